"""What an operator is told of an option that is wrong."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.types import PastDate

from vllm_scope.config import ScopeConfig
from vllm_scope.errors import ConfigError
from vllm_scope.files.options import FileOptions
from vllm_scope.request.options import Number, checked


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: StrictStr = Field(default="a", min_length=1)
    threads: StrictInt = Field(default=1, ge=1, le=64)
    wait_s: Number = Field(default=1.0, gt=0, lt=9)
    quiet: StrictBool = False
    road: Literal["shared", "tcp"] = "tcp"
    places: dict[str, tuple[StrictInt, ...]] = Field(default_factory=dict)
    day: Annotated[PastDate | None, Field()] = None


class Needed(BaseModel):
    root: StrictStr


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        pytest.param({"name": 3}, "name is 3; it must be a string.", id="string"),
        pytest.param({"name": ""}, "name is ''; it must have 1 or more characters.", id="empty"),
        pytest.param({"threads": "4"}, "threads is '4'; it must be an integer.", id="integer"),
        pytest.param({"threads": 0}, "threads is 0; it must be at least 1.", id="too-little"),
        pytest.param({"threads": 65}, "threads is 65; it must be at most 64.", id="too-much"),
        pytest.param({"wait_s": "long"}, "wait_s is 'long'; it must be a number.", id="word"),
        pytest.param({"wait_s": None}, "wait_s is None; it must be a number.", id="nothing"),
        pytest.param({"wait_s": "8"}, "wait_s is '8'; it must be a number.", id="text"),
        pytest.param({"wait_s": True}, "wait_s is True; it must be a number.", id="bool"),
        pytest.param(
            {"wait_s": float("nan")}, "wait_s is nan; it must be a finite number.", id="nan"
        ),
        pytest.param({"wait_s": 0}, "wait_s is 0; it must be greater than 0.", id="zero"),
        pytest.param({"wait_s": 9}, "wait_s is 9; it must be less than 9.", id="not-less"),
        pytest.param({"quiet": "no"}, "quiet is 'no'; it must be true or false.", id="boolean"),
        pytest.param({"road": "air"}, "road is 'air'; it must be 'shared' or 'tcp'.", id="literal"),
        pytest.param({"places": [3]}, "places is [3]; it must be an object.", id="object"),
        pytest.param({"places": {"a": 3}}, "places.a is 3; it must be a list.", id="list"),
        pytest.param(
            {"places": {"a": [1, "b"]}}, "places.a[1] is 'b'; it must be an integer.", id="element"
        ),
        pytest.param(
            {"places": {7: []}}, "places has the key 7; it must be a string.", id="number-as-key"
        ),
        pytest.param(
            {"thread": 4},
            "thread is no option; did you mean threads? The options are name, threads, wait_s, "
            "quiet, road, places, day.",
            id="near",
        ),
        pytest.param({"zzz": 4}, "zzz is no option. The options are name, thr", id="far"),
        pytest.param({7: 4}, "7 is no option. The options are name, thr", id="number"),
    ],
)
def test_a_wrong_option_is_one_plain_sentence(body, sentence):
    with pytest.raises(ConfigError) as caught:
        checked(Options, body, "sinks.a.")
    assert str(caught.value).startswith(f"sinks.a.{sentence}")


def test_an_option_that_is_missing_does_not_show_the_others():
    with pytest.raises(ConfigError) as caught:
        checked(Needed, {"token": "secret"}, "")
    assert str(caught.value) == "root is missing; it must be given."


def test_the_value_of_an_unknown_option_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        checked(Options, {"tokn": "secret"}, "")
    assert "secret" not in str(caught.value)


def test_an_unknown_kind_keeps_the_words_of_pydantic():
    with pytest.raises(ValidationError) as theirs:
        Options.model_validate({"day": "2999-01-01"})
    with pytest.raises(ConfigError) as ours:
        checked(Options, {"day": "2999-01-01"}, "")
    assert str(ours.value) == f"day is '2999-01-01'; {theirs.value.errors()[0]['msg']}."


def test_a_name_that_is_not_there_is_asked_back_before_one_that_is_missing():
    with pytest.raises(ConfigError, match=r"roott is no option; did you mean root\?"):
        FileOptions.parse({"roott": "x"})
    with pytest.raises(ConfigError, match="root is missing; it must be given"):
        FileOptions.parse({"layout": "packed"})


def test_a_sink_that_is_not_installed_is_named_with_those_that_are():
    with pytest.raises(ConfigError) as error:
        ScopeConfig.parse({"sinks": {"filesytem": {"root": "x"}}})
    assert "sinks.filesytem: no sink is called 'filesytem'; did you mean filesystem?" in str(
        error.value
    )
