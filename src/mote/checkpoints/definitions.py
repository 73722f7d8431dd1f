"""Instructions that are made from the definition of a task."""

TEMPLATE = "Instruct: {definition}\nQuery: "
"""Equation 2 of NV-Embed (arXiv:2405.17428), as E5-Mistral and Qwen3-Embedding write it, too."""


def instruction_with(definition: str, template: str | None = None) -> str:
    """Return the instruction that describes a task.

    Args:
        definition: What to do with the texts, as in "Given a question, retrieve passages that answer it".
        template: The instruction, with the placeholder `{definition}`. The text follows it; `{text}` may mark this at
            the end. Default: `TEMPLATE`.

    Raises:
        ValueError: If the template does not contain `{definition}` once, or has anything after `{text}`.
    """
    template = (template or TEMPLATE).removesuffix("{text}")
    if template.count("{definition}") != 1 or "{text}" in template:
        raise ValueError(f"The template {template!r} must hold {{definition}} once, and {{text}} only at its end")
    return template.replace("{definition}", definition)
