"""``tensorwire plan``: what a model would send between workers, told without a job and without its weights."""
