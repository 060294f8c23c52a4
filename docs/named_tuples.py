"""An extension of griffe: what the constructor of a NamedTuple takes, as griffe finds out for dataclasses itself."""

from typing import Any

import griffe


class NamedTuples(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if "NamedTuple" not in map(str, cls.bases):
            return
        either = griffe.ParameterKind.positional_or_keyword
        fields = [x for x in cls.attributes.values() if "instance-attribute" in x.labels]
        parameters = [griffe.Parameter(x.name, annotation=x.annotation, kind=either, default=x.value) for x in fields]
        own = griffe.Parameter("self", kind=either)
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(own, *parameters)))
