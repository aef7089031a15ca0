"""All that is drawn, by matplotlib: the extra ``plot``. It is imported when a picture is asked for."""
