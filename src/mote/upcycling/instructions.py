"""Instructions of the result of upcycling: from the options, the source, and the paper."""

from mote.checkpoints.definitions import instruction_with
from mote.remote.configuration_mote import MTEB_PROMPTS, PAPER_INSTRUCTIONS, ROLE_HINTS, UNSEEN_TASKS, MoTEConfig
from mote.upcycling.options import UpcyclingOptions


def instructions_of(options: UpcyclingOptions, config: MoTEConfig, of_source: dict[str, str]) -> dict[str, str]:
    """Return the instructions of a result: for each task from the options, else from the source, else from the config.

    The paper's instructions are not used together with definitions. A task that follows another one, as `query` follows
    `search_query`, has the instruction of that task.
    """
    given = options.instruction_texts if options.instructions else dict.fromkeys(config.tasks, "")
    definitions = options.definitions
    if both := sorted(given.keys() & definitions.keys()):
        raise ValueError(f"The task {both[0]!r} has an instruction and a definition: give one of the two")
    made = {task: instruction_with(definition, options.template) for task, definition in definitions.items()}
    papers = PAPER_INSTRUCTIONS if made else {}
    own = {task: text for task, text in config.instructions.items() if text != papers.get(task)}
    texts = {**own, **of_source, **given, **made}
    for task, like in UNSEEN_TASKS.items():
        together = like not in config.experts and task in config.tasks and config.tasks[task] == config.tasks.get(like)
        if together and like in texts:
            texts.setdefault(task, texts[like])
    return texts


def instructions_from(prompts: dict[str, str], config: MoTEConfig) -> dict[str, str]:
    """Take over the prompts of a source, which was trained with them, as instructions.

    1. A prompt under MTEB's name of a task counts as the task's.
    2. The prompt of a task also becomes that of its expert, unless the expert has its own. A prompt with text takes
       precedence over an empty one.
    3. The prompt of an unseen task, such as `sts`, is for this task only: its expert is trained for something else.
    """
    under_mteb_names = {MTEB_PROMPTS[name]: prompts[name] for name in MTEB_PROMPTS if name in prompts}
    texts = {task: text for task, text in {**under_mteb_names, **prompts}.items() if task in config.tasks}
    of_unseen = UNSEEN_TASKS.keys() - {*ROLE_HINTS}
    served = [(config.tasks[task], text) for task, text in texts.items() if task not in of_unseen]
    of_experts = dict(sorted(served, key=lambda of_task: bool(of_task[1])))
    return {**of_experts, **{task: text for task, text in texts.items() if text or task not in ROLE_HINTS}}
