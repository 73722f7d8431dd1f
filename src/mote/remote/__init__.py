"""Code of saved models: loaded from there with `trust_remote_code=True`, and from here by the package."""
