"""Which files are read and which are held out: by name alone, wherever the folder lies."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.trainer.corpus import SEPARATOR, Corpus, CorpusLimits, check_paths, read_corpus, standard_library

LIMITS = CorpusLimits(max_bytes=10_000_000, heldout_fraction=0.1, heldout_max_bytes=10_000)


def make_folder(folder: Path, n_files: int = 40) -> Path:
    for number in range(n_files):
        path = folder / f"part{number % 3}" / f"file{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{number}>" + "text " * (50 + number))
    return folder


def names(corpus: Corpus) -> list[str]:
    return [document.key for document in corpus.training]


def test_held_out_files_are_never_trained_on(tmp_path: Path) -> None:
    corpus = read_corpus([make_folder(tmp_path)], LIMITS)
    trained = b"".join(document.text for document in corpus.training)
    heldout = corpus.heldout.split(SEPARATOR)
    assert len(heldout) == 40 - len(corpus.training)
    for text in heldout:
        assert text.startswith(b"<")
        assert text[: text.index(b">") + 1] not in trained


def test_another_place_gives_the_same_corpus(tmp_path: Path) -> None:
    one = make_folder(tmp_path / "one")
    other = tmp_path / "far" / "away"
    shutil.copytree(one, other)
    assert read_corpus([one], LIMITS) == read_corpus([other], LIMITS)


def test_a_file_stays_on_its_side_when_others_come_and_go(tmp_path: Path) -> None:
    before = {d.key for d in read_corpus([make_folder(tmp_path)], LIMITS).training}
    for number in (4, 11, 23):
        (tmp_path / f"part{number % 3}" / f"file{number}.txt").unlink()
    (tmp_path / "new.txt").write_text("new text")
    after = {d.key for d in read_corpus([tmp_path], LIMITS).training}
    assert after - before <= {"0/new.txt"}
    assert {key.rsplit("/", 1)[1] for key in before - after} <= {"file4.txt", "file11.txt", "file23.txt"}


def test_binary_and_hidden_and_empty_files_are_left_out(tmp_path: Path) -> None:
    make_folder(tmp_path, 5)
    (tmp_path / "nul.txt").write_bytes(b"text\0text")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "utf8.txt").write_text("naïve, 東京")
    corpus = read_corpus([tmp_path], LIMITS)
    found = b"".join(d.text for d in corpus.training) + corpus.heldout
    assert "東京".encode() in found
    for absent in (b"secret", b"ref", b"text\0text", "naïve".encode("latin-1")):
        assert absent not in found


def test_max_bytes_bounds_what_is_read_and_takes_files_by_chance(tmp_path: Path) -> None:
    make_folder(tmp_path)
    limits = CorpusLimits(max_bytes=3000, heldout_fraction=0.1, heldout_max_bytes=10_000)
    corpus = read_corpus([tmp_path], limits)
    total = sum(len(d.text) for d in corpus.training) + len(corpus.heldout.replace(SEPARATOR, b""))
    assert total == 3000
    assert len({Path(key).parent for key in names(corpus)}) > 1


def test_a_limit_that_cuts_a_character_does_not_make_a_file_binary(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("é" * 100)
    corpus = read_corpus([path], CorpusLimits(99, 0.1, 1000))
    assert sum(len(d.text) for d in corpus.training) + len(corpus.heldout) == 99


def test_the_evaluated_text_is_a_share_of_every_held_out_file_or_the_end_of_a_single_one(tmp_path: Path) -> None:
    make_folder(tmp_path, 60)
    whole = read_corpus([tmp_path], CorpusLimits(10**7, 0.3, 10**6)).heldout.split(SEPARATOR)
    some = read_corpus([tmp_path], CorpusLimits(10**7, 0.3, 1000)).heldout.split(SEPARATOR)
    assert len(some) == len(whole) > 5
    assert sum(map(len, some)) == 1000
    assert all(part in text for part, text in zip(some, whole, strict=True))
    path = tmp_path / "book.txt"
    text = bytes(random.Random(0).choices(b"abcdefgh \n", k=5000))
    path.write_bytes(text)
    corpus = read_corpus([path], LIMITS)
    assert corpus.training[0].text == text[:4500]
    assert corpus.heldout == text[4500:]


@pytest.mark.parametrize("n_files", [2, 3])
def test_few_files_still_have_one_on_either_side(tmp_path: Path, n_files: int) -> None:
    corpus = read_corpus([make_folder(tmp_path, n_files)], CorpusLimits(10**6, 0.01, 1000))
    assert len(corpus.training) == n_files - 1
    assert corpus.heldout


def test_the_standard_library_is_the_default_text() -> None:
    corpus = read_corpus([], CorpusLimits(2_000_000, 0.02, 30_000))
    keys = names(corpus)
    assert sum(len(d.text) for d in corpus.training) > 1_500_000
    assert all(key.endswith(".py") for key in keys)
    assert not any("site-packages" in key or "/test/" in key for key in keys)
    assert 29_000 <= len(corpus.heldout) <= 31_000
    assert standard_library().is_dir()


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.* does not exist: give a text file"):
        read_corpus([tmp_path / "nowhere"], LIMITS)


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    """As below a folder that this user may not enter; a name that is too long is one for every user."""
    with pytest.raises(ConfigError, match=r"data path a+ cannot be read: File name too long; give a text file"):
        check_paths([Path("a" * 300)])
    (tmp_path / "link").symlink_to("a" * 300)
    with pytest.raises(ConfigError, match=r"data file .*link cannot be read: File name too long"):
        read_corpus([tmp_path], LIMITS)


@pytest.mark.parametrize("content", [None, b"\0\1\2", b""])
def test_a_place_without_text_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=f"no text was found in {tmp_path}.*give files or folders"):
        read_corpus([tmp_path], LIMITS)


def test_links_to_folders_do_not_lead_in_circles(tmp_path: Path) -> None:
    make_folder(tmp_path, 4)
    (tmp_path / "part0" / "loop").symlink_to(tmp_path)
    corpus = read_corpus([tmp_path], LIMITS)
    assert len(corpus.training) == 3
