"""Checks of a model's configuration. Each raises `ArgumentError` with the field, its value and the allowed values, to
which a job file adds its table (see `in_section`)."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import ArgumentError, UserError, did_you_mean


def positive(owner: str, field: str, value: float) -> None:
    if not value > 0:  # nor nan
        raise ArgumentError(field, f" = {value} of {owner} must be greater than 0.")


def fraction(owner: str, field: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ArgumentError(field, f" = {value} of {owner} must be at least 0 and below 1.")


def one_of(owner: str, field: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        hint = did_you_mean(str(value), [str(choice) for choice in choices])
        raise ArgumentError(field, f" = {value!r} of {owner} is none of {', '.join(map(repr, choices))}.{hint}")


def short_enough(owner: str, tokens: int, sequence: int) -> None:
    if tokens > sequence:
        raise UserError(
            f"{owner}: a row of {tokens} tokens was given to a model of sequence={sequence}; cut the rows or raise "
            "`sequence`."
        )


def divides(owner: str, field: str, part: int, whole_field: str, whole: int) -> None:
    if whole % part:
        raise ArgumentError(field, f" = {part} of {owner} does not divide {whole_field} = {whole}.")
