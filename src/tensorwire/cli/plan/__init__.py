"""``tensorwire plan``: a model's traffic between workers, without a job and without its weights."""
