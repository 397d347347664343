"""Limits that are checked before anything is sent, prices, and who is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.errors import UsageError
from autokernel.proposers import keys
from autokernel.proposers.choice import choose
from autokernel.proposers.prices import Price, parse_price, price_of
from autokernel.proposers.provider import Request
from autokernel.proposers.spending import Spending, worst_input_tokens

ASK = Request("rules", "a task", [{"role": "user", "content": "go"}], 1000)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("AUTOKERNEL_LLM", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@given(st.text(max_size=200), st.text(max_size=200))
def test_the_worst_case_counts_every_byte(system: str, task: str) -> None:
    request = Request(system, task, [{"role": "user", "content": "x"}], 10)
    size = len((system + task + "x").encode("utf-8", "replace"))
    assert worst_input_tokens(request) >= size


def test_what_an_exchange_costs() -> None:
    price = Price(3.0, 15.0, cached=0.3)
    assert price.cost(1_000_000, 0, 0) == pytest.approx(3.0)
    assert price.cost(1_000_000, 900_000, 100_000) == pytest.approx(0.3 + 0.27 + 1.5)
    assert Price(1.0, 1.0, longer=((200, Price(2.0, 2.0)),)).cost(1000, 0, 0) == pytest.approx(0.002)


def test_a_request_whose_worst_case_does_not_fit_is_not_sent() -> None:
    tokens, dollars = Spending(price=Price(1.0, 10.0)).worst(ASK)
    assert tokens == worst_input_tokens(ASK) + 1000 and dollars is not None and dollars > 0.01
    assert Spending(max_tokens=tokens).refuses(ASK) == ""
    assert "may take" in Spending(max_tokens=tokens - 1).refuses(ASK)
    assert Spending(max_usd=dollars, price=Price(1.0, 10.0)).refuses(ASK) == ""
    assert "may cost" in Spending(max_usd=dollars * 0.99, price=Price(1.0, 10.0)).refuses(ASK)


def test_what_was_spent_counts() -> None:
    spending = Spending(max_usd=1.0, price=Price(1.0, 10.0))
    spending.add(100_000, 100_000, None)  # nobody reported a cost: by the list
    assert spending.usd == pytest.approx(1.1) and "is spent" in spending.refuses(ASK)
    spending = Spending(max_usd=1.0, price=Price(1.0, 10.0))
    spending.add(100_000, 100_000, 0.2)  # the provider's own account goes before the list's
    assert spending.usd == pytest.approx(0.2) and not spending.refuses(ASK)


@pytest.mark.parametrize("text", ["3", "3,x", "3,15,1,1", "-1,2", "nan,1", ""])
def test_bad_prices(text: str) -> None:
    with pytest.raises(UsageError, match="IN,OUT"):
        parse_price(text)


def test_listed_prices() -> None:
    known = price_of("anthropic", "claude-sonnet-4-5")
    assert known is not None and 0 < known.input < known.output
    assert price_of("openai", "no-such-model-at-all") is None


def test_a_key_alone_chooses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789abcdef")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789abcdef")
    assert choose() is None
    monkeypatch.setenv("AUTOKERNEL_LLM", "openai:some-model")
    chosen = choose()
    assert chosen is not None and (chosen.name, chosen.origin) == ("openai", "AUTOKERNEL_LLM")
    assert choose("none") is None


def test_no_run_is_without_a_limit() -> None:
    listed, unlisted = choose("anthropic:claude-sonnet-4-5"), choose("openai:unheard-of")
    assert listed is not None and listed.spending.max_usd == 5.0
    assert unlisted is not None and unlisted.spending.max_tokens == 2_000_000


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"max_usd": 0.0}, "lets nothing be sent"),
        ({"max_tokens": 0}, "lets nothing be sent"),
        ({"max_usd": 1.0}, "no price is known"),
        ({"price": "cheap"}, "IN,OUT"),
        ({"effort": "huge"}, "there are low"),
    ],
)
def test_choices_that_can_not_be_followed(how: dict, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        choose("openai:unheard-of", **how)
    assert "\n" not in str(caught.value)


def config(tmp_path: Path, text: str, mode: int = 0o600) -> None:
    folder = tmp_path / "autokernel"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text)
    (folder / "config.toml").chmod(mode)


SECRET = "sk-local-0123456789abcdef"


def test_a_key_from_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config(tmp_path, f'llm = "openai:m"\nprice = "1,2"\n[keys]\nopenai = "{SECRET}"\n')
    assert keys.find_key("openai") == SECRET
    chosen = choose()
    assert chosen is not None and chosen.price == Price(1.0, 2.0)
    assert SECRET not in repr(chosen) and SECRET not in keys.redact(f"it was {SECRET}.")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment-1")
    assert keys.find_key("openai") == "sk-of-the-environment-1"


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 0o644, "chmod 600"),
        ("[keys\n", 0o600, "no TOML"),
        ('colour = "red"\n', 0o600, "no setting 'colour'"),
        ("[keys]\nopenai = 3\n", 0o600, "in quotes"),
    ],
)
def test_a_settings_file_that_is_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    config(tmp_path, text, mode)
    with pytest.raises(UsageError, match=why):
        keys.read_config()


@pytest.mark.parametrize(
    "text",
    ["Bearer abcdefgh12345678", "key sk-proj-abcDEF0123456789xyz", '{"api_key": "abcdefgh12345678"}',
     "http://me:abcdefgh12345678@proxy:80/"],
)  # fmt: skip
def test_what_looks_like_a_key_is_taken_out(text: str) -> None:
    said = keys.redact(text)
    assert keys.REDACTED in said and "12345678" not in said and "0123456789" not in said


def test_prose_is_left_as_it_is() -> None:
    text = "risk-free pk-nothing x_token = tokens_in; sk-learn is a library"
    assert keys.redact(text) == text
