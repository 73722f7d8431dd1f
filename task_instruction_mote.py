"""The Sentence-Transformers module of a MoTE that leaves instructions out of its pooling."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or not __package__:  # installed, as a top-level module
    try:  # transformers takes an import outside of a `try` for a package that must be installed
        from instruction_mote import InstructedTransformer
        from sentence_transformer_mote import MoTETransformer
    finally:
        pass
else:  # remote code
    from .instruction_mote import InstructedTransformer
    from .sentence_transformer_mote import MoTETransformer


class InstructedMoTETransformer(InstructedTransformer, MoTETransformer):
    """A `MoTETransformer` that says which tokens are pooled, as `InstructedTransformer` does."""

    prompt_for = MoTETransformer.prompt_for

    def decided_by(self, prompts: list[str], inputs: Any, task: str | None) -> dict[str, Any]:
        """Return the tasks of the texts, as arguments of `MoTETransformer.preprocess`.

        Raises:
            ValueError: If the task is unknown, or no rule decides on one.
        """
        return {"tasks": self.tasks_of(inputs, task, prompts)}
