"""geo3k as the parquet file that slime's loader reads, images included.

    python examples/geo3k_vlm_multi_turn/dataset.py --to FOLDER [--from SOURCE] [--split train]...

SOURCE is a data set on the Hugging Face hub, or a folder with its parquet files: rows of `images`,
`problem` and `answer`, as hiyouga/geometry3k has them. A row of the result:

    problem  str        one `<image>` where each image goes, then how to use the tool
    images   list[str]  each image as `data:image/png;base64,…`
    answer   str
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from geo3k_vlm_multi_turn.rollout import INSTRUCTION

SOURCE = "hiyouga/geometry3k"
IMAGE = "<image>"


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description="geo3k as the parquet that slime reads")
    parser.add_argument(
        "--to", type=Path, required=True, help="the folder to write <split>.parquet into"
    )
    parser.add_argument(
        "--from", dest="source", default=SOURCE, help=f"a data set or a folder [{SOURCE}]"
    )
    parser.add_argument("--split", action="append", help="[train]; may be given again")
    given = parser.parse_args()
    for split in given.split or ["train"]:
        target = given.to / f"{split}.parquet"
        try:
            rows = load(given.source, split)
            count = write(rows, target, len(rows))
        except (ValueError, OSError) as error:
            print(f"{given.source}, {split}: {error}", file=sys.stderr)
            return 1
        print(f"{target}: {count} problems")
    return 0


def load(source: str, split: str) -> Any:
    """The rows of a split; images stay encoded until a row is asked for.

    Raises ValueError where a column is missing; what `datasets` raises where there is no such set.
    """
    from datasets import load_dataset

    if Path(source).is_dir():
        files = sorted(map(str, Path(source).rglob(f"{split}*.parquet")))
        if not files:
            raise ValueError(f"no {split}*.parquet in this folder")
        rows = load_dataset("parquet", data_files={split: files}, split=split)
    else:
        rows = load_dataset(source, split=split)
    missing = {"images", "problem", "answer"} - set(rows.column_names)
    if missing:
        raise ValueError(
            f"it has no column {', '.join(sorted(missing))}; it has {rows.column_names}"
        )
    return rows


def write(rows: Iterable[Mapping[str, Any]], target: Path, count: int | None = None) -> int:
    """Write `rows` to `target`; how many. What was there is replaced once the new file is whole.

    Raises ValueError, with the row's number, where one cannot be converted: nothing is written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tqdm import tqdm

    text = pa.string()
    schema = pa.schema([("problem", text), ("images", pa.list_(text)), ("answer", text)])
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    written = 0
    try:
        with pq.ParquetWriter(beside, schema) as writer:
            converted = map(
                convert,
                tqdm(rows, total=count, unit=" problems", desc=target.name),
                range(sys.maxsize),
            )
            for batch in _batches(converted, 64):
                writer.write_table(pa.Table.from_pylist(batch, schema))
                written += len(batch)
        if not written:
            raise ValueError("there are no rows")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return written


def convert(row: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """One row as slime reads it. Raises ValueError where it is none."""
    images = [_data_uri(image, number) for image in row["images"]]
    problem, answer = row["problem"], row["answer"]
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"row {number} has no problem")
    if answer is None or not str(answer).strip():
        raise ValueError(f"row {number} has no answer")
    places = problem.count(IMAGE)
    if not places:
        problem = IMAGE * len(images) + problem
    elif places != len(images):
        raise ValueError(f"row {number} has {len(images)} images and {places} places for them")
    return {"problem": f"{problem}\n\n{INSTRUCTION}", "images": images, "answer": str(answer)}


def _data_uri(image: Any, number: int) -> str:
    """An image (PIL's, or the bytes of a file as parquet keeps them) as a data URI (RFC 2397)."""
    from PIL import Image

    if isinstance(image, Mapping):
        image = image.get("bytes")
    if isinstance(image, bytes):
        try:
            image = Image.open(io.BytesIO(image))
        except OSError:
            raise ValueError(f"row {number} has an image that cannot be read") from None
    if not isinstance(image, Image.Image):
        raise ValueError(f"row {number} has no image but a {type(image).__name__}")
    # What is transparent is paper: without it, black lines would be on black.
    image = image.convert("RGBA")
    paper = Image.new("RGBA", image.size, "white")
    file = io.BytesIO()
    Image.alpha_composite(paper, image).convert("RGB").save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


if __name__ == "__main__":
    sys.exit(main())
