"""From a dense encoder to task experts in a minute, on a CPU, without a network.

    python examples/quickstart.py [--src FOLDER_OR_HUB_ID] [--out FOLDER]

1. Upcycle the small encoder of this repository: four experts, each a copy of its blocks.
2. Load the result with Transformers, and route each row of a batch through the expert of its task.
3. Load it with Sentence-Transformers, and search.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from mote import upcycle

SMALL_ENCODER = Path(__file__).parent / "small-encoder"

DOCUMENTS = """
Whales are mammals: they breathe air through a blowhole and come up to the surface every few minutes.
Bees tell each other where flowers are by dancing in the hive.
Cats sleep for about two thirds of the day.
An octopus has three hearts and blue blood.
Penguins cannot fly, but they swim faster than most people run.
Sourdough bread rises with wild yeast instead of the yeast that is sold in shops.
Rice is rinsed before cooking so that the grains do not stick together.
A stew tastes better when the meat is browned first.
Coffee beans are roasted to bring out their flavour.
Honey does not spoil, even after years in a jar.
The moon pulls at the oceans, which makes the tides.
Jupiter is the largest planet of the solar system.
Light from the sun takes about eight minutes to reach the earth.
A black hole is a place where gravity is so strong that light cannot get out.
Stars shine because hydrogen turns into helium inside them.
To undo the last commit but keep your changes, run git reset --soft HEAD~1.
A deadlock happens when two threads wait for each other for ever.
An index makes database queries faster and writes a little slower.
Use a virtual environment so that the packages of one Python project do not disturb another.
A hash table finds a value by its key in constant time on average.
Inflation means that prices rise and money buys less than before.
A mortgage is a loan for a house, which serves as the security.
Shares of a company usually fall when it earns less than expected.
Central banks raise interest rates to slow inflation down.
Insurance spreads the cost of an accident over many people.
Aspirin thins the blood and lowers a fever.
Vaccines train the immune system to know a virus before it strikes.
Drinking water and resting helps against a headache.
Regular running strengthens the heart.
Too little sleep makes it harder to remember things.
The offside rule in football keeps attackers from waiting next to the goal.
A marathon is a little more than forty-two kilometres long.
In chess, the bishop moves along the diagonals.
Tennis players change sides after every odd game.
The Olympic Games are held every four years.
""".strip().splitlines()

QUERIES = [
    "how do whales get oxygen",
    "revert a commit without losing my work",
    "why does everything cost more than last year",
    "why are there tides in the sea",
    "medicine for a fever",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", default=str(SMALL_ENCODER), help="dense encoder (default: the repository's small one)")
    parser.add_argument("--out", help="where the MoTE goes (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print("1. Upcycle\n")
        folder = upcycle(options.src, options.out or Path(temporary) / "small-mote", report=print)
        print("\n2. Transformers: each row through the expert of its task\n")
        embed_with_transformers(str(folder))
        print("\n3. Sentence-Transformers: search\n")
        search(str(folder))


def embed_with_transformers(path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    model = AutoModel.from_pretrained(path, trust_remote_code=True).eval()
    show_routing(model)
    tasks = list(model.config.experts)
    texts = [model.config.instruction_of(task) + DOCUMENTS[0] for task in tasks]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        vectors = model(**batch, task=tasks).pooler_output  # [4, H]: one row per task
        same_text = tokenizer([DOCUMENTS[0]] * len(tasks), return_tensors="pt")
        same = model(**same_text, task=tasks).pooler_output
    print(f"\none text, its instruction in front, under {len(tasks)} tasks: {list(vectors.shape)}")
    spread = (same - same[0]).abs().max().item()
    print(f"the same text without instructions, under each expert: largest difference {spread:.1e}")
    print("(fresh experts are copies; they become different in training)" if spread < 1e-5 else "(trained experts)")


def show_routing(model: torch.nn.Module) -> None:
    counts = model.parameter_counts()
    print(f"{counts['total'] / 1e6:.1f} M parameters, of which a text uses {counts['active'] / 1e6:.1f} M")
    for task, expert in model.config.tasks.items():
        print(f"  {task:<20} → expert {expert:<16} instruction {model.config.instruction_of(task)!r}")


def search(path: str) -> None:
    model = SentenceTransformer(path, trust_remote_code=True)
    documents = model.encode(DOCUMENTS, prompt_name="search_document")
    queries = model.encode(QUERIES, prompt_name="search_query")
    scores = model.similarity(queries, documents)  # [queries, documents]
    for query, row in zip(QUERIES, scores, strict=True):
        print(query)
        for position in row.topk(2).indices.tolist():
            print(f"  {row[position]:.2f}  {DOCUMENTS[position]}")


if __name__ == "__main__":
    main()
