# SPDX-License-Identifier: Apache-2.0
"""A strict reader of Prometheus' text format 0.0.4: raises ValueError for what the format forbids."""
import math
import re

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
VALUE = re.compile(r"[+-]?Inf|NaN|[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
PARTS = ("_bucket", "_count", "_sum")


class Family:
    def __init__(self, name):
        self.name, self.type, self.help = name, None, None
        self.samples = []               # (name, labels dict, value)

    def value(self, name=None, **labels):
        """Sum of the samples with these labels."""
        found = [v for n, l, v in self.samples
                 if n == (name or self.name) and all(l.get(k) == w for k, w in labels.items())]
        if not found:
            raise KeyError((name or self.name, labels))
        return sum(found)


def sample(line):
    match = NAME.match(line)
    if not match:
        raise ValueError(f"no name: {line!r}")
    name, at, labels = match.group(), match.end(), {}
    if line[at:at + 1] == "{":
        at += 1
        while line[at:at + 1] != "}":
            label = LABEL.match(line, at)
            if not label:
                raise ValueError(f"malformed label at {at}: {line!r}")
            if label.group(1) in labels:
                raise ValueError(f"label twice: {line!r}")
            labels[label.group(1)] = label.group(2)
            at = label.end()
            if line[at:at + 1] == ",":
                at += 1
            elif line[at:at + 1] != "}":
                raise ValueError(f"labels not closed: {line!r}")
        at += 1
    if line[at:at + 1] != " " or not VALUE.fullmatch(line[at + 1:]):
        raise ValueError(f"no value: {line!r}")
    return name, labels, float(line[at + 1:])


def check_histogram(family):
    series = {}
    for name, labels, value in family.samples:
        rest = {k: v for k, v in labels.items() if k != "le"}
        entry = series.setdefault(tuple(sorted(rest.items())), {"buckets": []})
        if name == family.name + "_bucket":
            if set(entry) != {"buckets"}:
                raise ValueError(f"{family.name}: bucket after its count or sum")
            entry["buckets"].append((float(labels["le"].replace("Inf", "inf")), value))
        elif "le" in labels or name[len(family.name):] in entry:
            raise ValueError(f"{family.name}: {name} {labels}")
        else:
            entry[name[len(family.name):]] = value
    for labels, entry in series.items():
        bounds = [b for b, _ in entry["buckets"]]
        counts = [v for _, v in entry["buckets"]]
        if sorted(set(bounds)) != bounds or not bounds or not math.isinf(bounds[-1]):
            raise ValueError(f"{family.name} {labels}: bounds {bounds}")
        if sorted(counts) != counts or counts[-1] != entry["_count"] or "_sum" not in entry:
            raise ValueError(f"{family.name} {labels}: counts {counts} {entry}")


def parse(text):
    """Families by name."""
    families, current, seen = {}, None, set()
    if not text.endswith("\n"):
        raise ValueError("no line feed at the end")
    for line in text.split("\n")[:-1]:
        comment = re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.*)", line)
        if line.startswith("#"):
            if not comment:
                raise ValueError(f"comment: {line!r}")
            kind, name, rest = comment.groups()
            if current is None or current.name != name:
                if name in families:
                    raise ValueError(f"{name} is not contiguous")
                current = families[name] = Family(name)
            attribute = kind.lower()
            if getattr(current, attribute) is not None or current.samples:
                raise ValueError(f"{kind} of {name} twice or late")
            if kind == "TYPE" and rest not in ("counter", "gauge", "histogram"):
                raise ValueError(f"type of {name}: {rest}")
            setattr(current, attribute, rest)
            continue
        name, labels, value = sample(line)
        if current is None or current.type is None or not current.help:
            raise ValueError(f"sample without HELP and TYPE: {line!r}")
        allowed = [current.name + part for part in PARTS] if current.type == "histogram" else [
            current.name]
        if name not in allowed:
            raise ValueError(f"{name} among the samples of {current.name}")
        key = (name, tuple(sorted(labels.items())))
        if key in seen:
            raise ValueError(f"sample twice: {line!r}")
        seen.add(key)
        if current.type == "counter" and not value >= 0:
            raise ValueError(f"counter below 0: {line!r}")
        current.samples.append((name, labels, value))
    for family in families.values():
        if family.type is None or not family.samples:
            raise ValueError(f"{family.name}: no TYPE or no sample")
        if family.type == "counter" and not family.name.endswith("_total"):
            raise ValueError(f"counter {family.name} does not end in _total")
        if family.type == "histogram":
            check_histogram(family)
    return families
