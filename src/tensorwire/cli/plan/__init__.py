"""``tensorwire plan``: what a model would send between workers, without a job and without its weights."""
