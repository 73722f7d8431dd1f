"""The texts that the models in `examples` are trained on: their sources, and licences that let weights be passed on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextSet:
    """One data set that training texts are taken from."""

    path: str  # folder under --data; only its train.jsonl.gz is read
    licence: str
    source: str


# Left out on purpose: non-commercial sets (quora_duplicates, amazon_counterfactual), sets whose source states no
# licence (conference_papers, ag_news, trec6 ...), GFDL (foldoc), banking77 (an MTEB task), sts and beir (the figures'
# sets), offensive tweets. The licences are those of the texts; the student's folder holds none of them.
ENCODER_SETS = (
    TextSet("retrieval/advisories", "CC BY 4.0; CC0", "golang/vulndb; RustSec/advisory-db"),
    TextSet("retrieval/debian", "each package's, all free software", "Debian bookworm main, package descriptions"),
    TextSet("retrieval/gsm8k", "MIT", "openai/grade-school-math, train split"),
    TextSet("retrieval/medquad", "CC BY 4.0", "abachaa/MedQuAD"),
    TextSet("retrieval/python_docs", "each package's, mostly BSD, MIT, Apache-2.0", "docstrings of 101 PyPI packages"),
    TextSet("retrieval/reddit", "ODC PDDL 1.0", "umbrae/reddit-top-2.5-million"),
    TextSet("retrieval/scitldr", "Apache-2.0", "allenai/scitldr, train and dev splits"),
    TextSet("retrieval/stackexchange_qa", "CC BY-SA 3.0/4.0", "Stack Exchange, small sites"),
    TextSet("retrieval/stackexchange_title_body", "CC BY-SA 3.0/4.0", "Stack Exchange, small sites"),
    TextSet("retrieval/tldr_pages", "CC BY 4.0", "tldr-pages/tldr"),
    TextSet("retrieval/wordnet", "WordNet licence", "WordNet 3.0"),
    TextSet("classification/clinc150", "CC BY 3.0", "clinc/oos-eval"),
    TextSet("classification/hwu64", "CC BY 4.0", "xliuhw/NLU-Evaluation-Data"),
    TextSet("clustering/open_trivia", "CC BY-SA 4.0", "uberspot/OpenTriviaQA"),
    TextSet("clustering/reddit_titles", "ODC PDDL 1.0", "umbrae/reddit-top-2.5-million"),
    TextSet("clustering/arxiv_titles", "CC0 (arXiv metadata)", "staeiou/arxiv_archive"),
    TextSet("clustering/arxiv_abstracts", "CC0 (arXiv metadata)", "staeiou/arxiv_archive"),
)
