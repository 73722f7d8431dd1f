"""Libraries over Sentence-Transformers."""

from typing import Any

from ecosystem.promises import Reference, promises


@promises("KeyBERT", "keybert")
def keybert(names: dict[str, Any], reference: Reference) -> None:
    whales, inflation = ([word for word, _ in keywords] for keywords in names["keywords"])
    assert set(whales) & {"whales", "mammals", "blowhole"}
    assert set(inflation) & {"inflation", "prices", "rise"}
    reference.is_by(names["vectors"], names["texts"], "clustering")
