"""The formats of JSON Schema as automata, each no wider than what its RFC and the jsonschema package accept."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import Final

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.regex import compile_regex

_YEAR: Final = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # a century divides by 400
)
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    rf"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_CLOCK})"

_N: Final = r"[0-9]{1,9}"
_DURATION_TIME: Final = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE: Final = rf"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION: Final = rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)"


def _labels(longest: int, most: int) -> str:
    """Up to ``most`` labels of up to ``longest`` characters, the last not of digits alone."""
    label = rf"[A-Za-z0-9](?:[A-Za-z0-9-]{{0,{longest - 2}}}[A-Za-z0-9])?"
    return rf"{label}(?:\.{label}){{0,{most - 1}}}"


# The whole name has at most 253 characters; an automaton that counts both would have 16,000 states.
_HOSTNAME: Final = rf"(?:{_labels(63, 3)}|{_labels(29, 8)})"
_ATOM: Final = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED: Final = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_EMAIL: Final = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_labels(29, 8)}|\[{_IPV4}\])"

_H16: Final = r"[0-9A-Fa-f]{1,4}"
_LS32: Final = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6: Final = (
    "(?:"
    + "|".join(
        [
            rf"(?:{_H16}:){{6}}{_LS32}",
            rf"::(?:{_H16}:){{5}}{_LS32}",
            *(rf"(?:(?:{_H16}:){{0,{n}}}{_H16})?::(?:{_H16}:){{{4 - n}}}{_LS32}" for n in range(5)),
            rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
            rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
        ]
    )
    + ")"
)


def _uri_parts(extra: str) -> tuple[str, str]:
    """RFC 3986, appendix A: (URI, relative reference); ``extra`` are further characters of RFC 3987."""
    unreserved = rf"A-Za-z0-9._~{extra}\-"
    sub = r"!$&'()*+,;="
    percent = r"%[0-9A-Fa-f]{2}"
    pchar = rf"(?:[{unreserved}{sub}:@]|{percent})"
    host = rf"(?:\[{_IPV6}\]|(?:[{unreserved}{sub}]|{percent})*)"
    authority = rf"(?:(?:[{unreserved}{sub}:]|{percent})*@)?{host}(?::[0-9]*)?"
    abempty = rf"(?:/{pchar}*)*"
    absolute = rf"/(?:{pchar}+{abempty})?"
    no_colon = rf"(?:[{unreserved}{sub}@]|{percent})+"
    rest = rf"(?:\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    uri = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{authority}{abempty}|{absolute}|{pchar}+{abempty}|){rest}"
    relative = rf"(?://{authority}{abempty}|{absolute}|{no_colon}{abempty}|){rest}"
    return uri, relative


_URI, _RELATIVE = _uri_parts("")
_IRI, _IRI_RELATIVE = _uri_parts("\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef")
_POINTER: Final = r"(?:/(?:[^~/]|~[01])*)*"
_TEMPLATE_NAME: Final = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(?:\.(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+)*"
_TEMPLATE_VARIABLE: Final = rf"{_TEMPLATE_NAME}\*?"

FORMATS: Final = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": rf"{_DATE}[Tt]{_TIME}",
        "duration": _DURATION,
        "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "email": _EMAIL,
        "idn-email": _EMAIL,
        "hostname": _HOSTNAME,
        "idn-hostname": _HOSTNAME,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": _URI,
        "uri-reference": f"(?:{_URI}|{_RELATIVE})",
        "iri": _IRI,
        "iri-reference": f"(?:{_IRI}|{_IRI_RELATIVE})",
        "uri-template": rf"(?:[!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{{2}}"
        rf"|\{{[+#./;?&]?{_TEMPLATE_VARIABLE}(?:,{_TEMPLATE_VARIABLE})*\}})*",
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(?:0|[1-9]{{1,8}}0?)(?:#|{_POINTER})",
    }
)
"""Format -> regex of the whole text. Some are narrower than their RFC: a number of labels, ASCII names."""

EXACT_FORMATS: Final = frozenset({"date", "uuid", "ipv4", "ipv6", "json-pointer"})
"""Formats whose automaton takes every text of the format, so that "not" of it is right too."""

UNHELD_FORMATS: Final = frozenset({"regex"})
"""Formats that the specification names and that no automaton holds."""


@lru_cache(maxsize=32)
def format_automaton(name: str) -> Automaton:
    return compile_regex(FORMATS[name])
