"""Plans of a model without a job and without its weights, for ``tensorwire plan``."""
