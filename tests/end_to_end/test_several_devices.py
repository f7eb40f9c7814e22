"""One configuration on several devices, which this machine need not have."""

import pytest
import torch

from teraplan import backend
from teraplan.config import Config
from teraplan.runtime.device import Device
from teraplan.runtime.open_device import open_device


def test_each_device_has_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.device] = []

    def open_any(config: Config, place: torch.device) -> Device:
        opened.append(place)
        return open_device(config, torch.device("cpu"))

    monkeypatch.setattr(backend, "open_device", open_any)
    config = Config.resolve({"device_budget": "1GiB"}, {})
    places = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    held = [backend._held_session(config, place) for place in places]
    assert len({id(one.session()) for one in held}) == len(places)
    assert opened == places
    assert backend._held_session(config, places[1]) is held[1]
    for one in held:
        one.session().close()


def test_a_graph_is_where_most_of_it_is() -> None:
    ids, weight = torch.ones(3, dtype=torch.int64), torch.empty(3, device="meta")
    assert backend._device([ids, 7, weight]) == weight.device
    assert backend._device([ids, 7]) == torch.device("cpu")
    assert backend._device([7]) == torch.device("cpu")
