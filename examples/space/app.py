"""An interactive demo of a MoTE: a map of texts under each expert, search, and which expert a text goes to.

    pip install -e . -r examples/space/requirements.txt        # in a clone
    python examples/space/app.py [--model FOLDER_OR_HUB_ID] [--port 7860]

Without a model, it shows the one in `examples/small-mote`. A MoTE comes with its own code, which the demo runs: only
show models that you trust.
"""

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported

import gradio as gr
import pandas as pd
import views
from matplotlib.figure import Figure
from sentence_transformers import SentenceTransformer

HERE = Path(__file__).resolve().parent
SMALL_MOTE = HERE.parent / "small-mote"
TEXTS: dict[str, list[tuple[str, str]]] = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
MAPS = list(TEXTS)
QUERIES = (
    "Cancel my dentist appointment on Friday.",
    "What is on my shopping list?",
    "I need to get up at six tomorrow.",
    "Can you put eggs on the list?",
)
MOST_FOUND = 6
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a5195", "#6b6b6b")
INTRODUCTION = """# One text, several experts
A MoTE (Mixture of Task Experts) embeds a text through the expert of its task, and each expert has its own notion of
which texts are alike."""
CALLS = (
    "encode(text)",
    "encode(text, task=…)",
    "encode(text, prompt_name=…)",
    "encode_query(text)",
    "encode_document(text)",
)
NONE = "none"
MOST_LINES = 500  # in a box: a visitor's texts are embedded by each expert while others wait
CSS = """
#spread table { width: 100%; margin: 0 }
#spread :is(table, tr, th, td) { border: 0 }
#spread :is(th, td) { padding: 2px 8px 2px 0; word-break: normal !important; overflow-wrap: normal !important }
#spread :is(th, td) { border-bottom: 1px solid var(--border-color-primary) }
#introduction h1 { margin: 0 }
"""
GREY = "#85858c"  # legible on white and on black


def lines_of(box: str) -> list[str]:
    """Return the lines of a box that are not blank."""
    lines = [line.strip() for line in box.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        raise ValueError(f"{len(lines):,} lines: write {MOST_LINES:,} at most.")
    return lines


def read_lines(box: str) -> list[tuple[str, str]]:
    """Read lines of `group | text`, sorted by group; a line without a group belongs to the group "text"."""
    parts = [line.partition("|") for line in lines_of(box)]
    return sorted((group.strip(), text.strip()) if bar else ("text", group.strip()) for group, bar, text in parts)


def write_lines(name: str) -> str:
    return "\n".join(f"{group} | {text}" for group, text in TEXTS[name])


def heat_map(view: views.View, groups: list[str], colours: dict[str, str]) -> Figure:
    """Draw the similarities of texts sorted by group; the colours at the side are the colours of the map."""
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    middles = [start + (groups.count(groups[start]) - 1) / 2 for start in starts]
    figure = Figure(figsize=(5.6, 4.1), layout="constrained", facecolor="none")
    axes = figure.subplots()
    image = axes.imshow(view.similarity, cmap="viridis", vmin=0, vmax=1)
    axes.set_title("Cosine similarity of each text to each other", fontsize=10, color=GREY)
    axes.set_xticks([])
    axes.set_yticks(middles, [groups[start] for start in starts], parse_math=False)
    axes.tick_params(length=0, pad=14, labelcolor=GREY)
    beside = [-0.03] * len(starts)
    axes.scatter(beside, middles, c=list(colours.values()), transform=axes.get_yaxis_transform(), clip_on=False)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=0.8)
        axes.axvline(start - 0.5, color="white", linewidth=0.8)
    figure.colorbar(image, ax=axes).ax.tick_params(colors=GREY)
    return figure


def says_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show the model's own error message on the page."""

    @functools.wraps(function)
    def inner(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ValueError as error:
            raise gr.Error(str(error), duration=None, print_exception=False) from error

    return inner


class Demo:
    """A model, and the computations behind the page. Threads of several visitors share it."""

    def __init__(self, model: SentenceTransformer, source: str) -> None:
        config = views.config_of(model)
        self.model, self.about = model, views.about(model, source)
        self.experts, self.tasks = list(config.available_experts), list(config.available_tasks)
        self.ways = {expert: (expert, expert) for expert in self.experts}
        sides = {side: config.tasks[side] for side in ("query", "document") if side in config.tasks}
        if len({*sides.values()}) == len(sides) == 2:  # one notion of likeness, of two experts
            others = (expert for expert in self.experts if expert not in sides.values())
            self.ways = {**{expert: (expert, expert) for expert in others}, "query → document": ("query", "document")}
        self.prompts = [name for name, prompt in model.prompts.items() if prompt or getattr(prompt, "task", None)]
        self.default_task, self.route_by_text = config.default_task or NONE, getattr(config, "route_by_text", True)
        instruction = next(filter(None, map(config.instruction_of, self.tasks)), "")
        self.example, self.call = instruction + QUERIES[0], CALLS[0]
        if not instruction and config.default_task is None:  # open with a call that names a task
            self.call = CALLS[1]
        self.views = functools.lru_cache(16)(functools.partial(views.views, model))

    def check(self, lines: str) -> str:
        """Return the lines of a box if they can be shown."""
        self.seen(lines)
        return lines

    def seen(self, lines: str) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, views.View]]:
        """Return groups, texts, and how each expert sees them."""
        groups, texts = zip(*read_lines(lines), strict=True) if lines.strip() else ((), ())
        return groups, texts, self.views(texts, groups)

    def show(self, lines: str, expert: str) -> tuple[pd.DataFrame, dict[str, Any], Figure, str]:
        """Show texts as an expert embeds them: a map, its settings, similarities, how well groups are separated."""
        groups, texts, seen = self.seen(lines)
        limit = 1.05 * max(abs(view.points).max() for view in seen.values())  # one scale for all experts
        colours = dict(zip(dict.fromkeys(groups), itertools.cycle(COLOURS)))
        points = pd.DataFrame(seen[expert].points, columns=["x", "y"]).assign(group=groups, text=texts)
        settings = {"x_lim": [-limit, limit], "y_lim": [-limit, limit], "color_map": colours}
        table = "| expert | nearest has same group | cosine within | between |\n| --- " + "| --: " * 3
        for name, view in seen.items():
            cells = (name, f"{view.nearest:.0%}", f"{view.within:.2f}", f"{view.between:.2f}")
            table += "|\n| " + " | ".join(f"**{cell}**" if name == expert else cell for cell in cells)
        return points, settings, heat_map(seen[expert], list(groups), colours), table + " |"

    def search(self, query: str, documents: str) -> list[str]:
        """Return what each expert finds nearest to a query, best first."""
        texts = lines_of(documents)
        if not query.strip() or not texts:
            raise ValueError("Write a query, and at least one text.")
        answers = []
        for name, tasks in self.ways.items():
            found = views.search(self.model, query, texts, *tasks)[:MOST_FOUND]
            answers.append(f"### {name}\n" + "\n".join(f"{rank}. {text} *{score:.2f}*" for rank, score, text in found))
        return answers

    def route(self, text: str, call: str, task: str, prompt_name: str, default_task: str, by_text: bool) -> str:
        """Say which expert a text goes to, and why."""
        role = {"encode_query(text)": "query", "encode_document(text)": "document"}.get(call)
        task_name, prompt = (task if "task" in call else role), (prompt_name if "prompt" in call else role)
        default = None if default_task == NONE else default_task
        way = views.way(self.model, text, task_name, prompt, default_task=default, route_by_text=by_text)
        rules = (f"{number}. {f'**{rule}** ←' if number == way.rule else rule}" for number, rule in views.RULES.items())
        found = f"## Expert: {way.expert}\nThe model reads `{way.reads}`\n\nThe first rule that applies:\n"
        return found + "\n".join(rules)


def page(demo: Demo) -> gr.Blocks:
    with gr.Blocks(title="MoTE: one text, several experts", analytics_enabled=False) as blocks:
        gr.Markdown(f"{INTRODUCTION}\n{demo.about}", elem_id="introduction")
        with gr.Tab("Map"):
            map_tab(demo, blocks)
        with gr.Tab("Search"):
            search_tab(demo, blocks)
        with gr.Tab("Which expert?"):
            route_tab(demo, blocks)
    return blocks


def map_tab(demo: Demo, blocks: gr.Blocks) -> None:
    with gr.Row():
        expert = gr.Radio(
            demo.experts,
            value=demo.experts[min(1, len(demo.experts) - 1)],
            label="Expert",
            scale=3,
            min_width=300,
            elem_id="expert",
        )
        example = gr.Dropdown(MAPS, value=MAPS[0], label="Example texts", scale=2, min_width=300)
    shown = gr.State(write_lines(MAPS[0]))
    drawing = gr.Column()
    with gr.Accordion("Edit the texts: one per line, as group | text", open=False):
        lines = gr.Textbox(write_lines(MAPS[0]), lines=12, show_label=False, label="Texts", elem_id="texts")
        update = gr.Button("Show these texts")
    example.change(lambda name: [write_lines(name)] * 2, example, [lines, shown])
    update.click(says_errors(demo.check), lines, shown)
    with drawing:

        @gr.render([shown, expert], triggers=[blocks.load, shown.change, expert.change])
        def draw(shown: str, expert: str) -> None:  # all anew: a ScatterPlot keeps its old points with new settings
            points, settings, heat, spread = demo.show(shown, expert)
            with gr.Row():
                gr.ScatterPlot(
                    points,
                    x="x",
                    y="y",
                    color="group",
                    colors_in_legend=[],
                    tooltip=["text", "group"],
                    x_title="first principal component",
                    y_title="second principal component",
                    height=350,
                    label="Each point is a text: hover or tap",
                    show_label=True,
                    scale=3,
                    min_width=300,
                    elem_id="map",
                    **settings,
                )
                with gr.Column(scale=2, min_width=300):
                    gr.Plot(heat, format="png", label="Similarity matrix", show_label=False, elem_id="heat-map")
            gr.Markdown(spread, elem_id="spread")


def search_tab(demo: Demo, blocks: gr.Blocks) -> None:
    query = gr.Textbox(QUERIES[0], label="Query", elem_id="query")
    gr.Examples([[each] for each in QUERIES], query, label="Example queries")
    with gr.Row():
        found = []
        for place in range(len(demo.ways)):
            with gr.Column(min_width=260):  # on a phone, one below the other
                found.append(gr.Markdown(elem_id=f"found-{place}"))
    button = gr.Button("Search", variant="primary")
    texts = "\n".join(dict.fromkeys(text for _, text in TEXTS[MAPS[0]]))
    documents = gr.Textbox(texts, lines=5, max_lines=8, label="Texts, one per line", elem_id="documents")
    gr.on([button.click, query.submit, query.change, blocks.load], says_errors(demo.search), [query, documents], found)


def route_tab(demo: Demo, blocks: gr.Blocks) -> None:
    with gr.Row():
        with gr.Column(scale=3):
            text = gr.Textbox(demo.example, label="Text", elem_id="text")
            call = gr.Radio(CALLS, value=demo.call, label="Call")
            task = gr.Dropdown(demo.tasks, label="task=", allow_custom_value=True, visible="task=" in demo.call)
            prompt_name = gr.Dropdown(demo.prompts, label="prompt_name=", visible=False)
            default_task = gr.Dropdown([NONE, *demo.tasks], value=demo.default_task, label="The model's default_task")
            by_text = gr.Checkbox(demo.route_by_text, label="Instructions in a text count (the model's route_by_text)")
            button = gr.Button("Find its expert", variant="primary")
        with gr.Column(scale=3):
            answer = gr.Markdown(elem_id="answer")
    chosen = [task, prompt_name]
    call.change(lambda name: [gr.update(visible=f"{box}=" in name) for box in ("task", "prompt_name")], call, chosen)
    triggers = [button.click, text.submit, blocks.load]
    found = gr.on(triggers, says_errors(demo.route), [text, call, *chosen, default_task, by_text], answer)
    found.failure(lambda: "## No expert", None, answer)


def launch(demo: Demo, **options: Any) -> str:
    """Serve the page; return its address, if `prevent_thread_lock` is among the options."""
    theme = gr.themes.Default(  # no fonts from other servers
        primary_hue="indigo", font="system-ui", font_mono="ui-monospace"
    )
    blocks = page(demo).queue(default_concurrency_limit=4)
    return str(blocks.launch(theme=theme, css=CSS, ssr_mode=False, footer_links=["gradio"], **options)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="a MoTE: a folder, or an id on the Hub")
    parser.add_argument("--port", type=int, help="port (default: the first free port from 7860)")
    options = parser.parse_args()
    if options.model is None and not SMALL_MOTE.is_dir():
        parser.error("Name a model: --model FOLDER_OR_HUB_ID, or the variable MODEL. Only a clone has one of its own.")
    source = options.model or str(SMALL_MOTE)
    try:
        demo = Demo(SentenceTransformer(source, trust_remote_code=True), source)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    launch(demo, server_port=options.port)


if __name__ == "__main__":
    main()
