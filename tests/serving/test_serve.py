"""The command line of the server: options reach the server, and the policy's facts reach the client."""

import asyncio
import os
import signal
import types

import numpy as np
import pytest
from policy_client import Client, running

from somaspeed_jax.recipes import Facts
from somaspeed_jax.serve import make_server, parser, run_until_stopped

PICTURE = np.zeros((4, 4, 3), np.uint8)


class Still:
    """Stays where it is; has what the server reads of a trained policy."""

    horizon = 2
    facts = Facts(("observation.images.top",), ("x", "y"), ("x", "y"), fps=10.0, prompt_length=32)
    config = types.SimpleNamespace(model=types.SimpleNamespace(name="pi05"))

    def act_batch(self, observations):
        return np.stack([np.repeat(o["state"][None], 2, 0) for o in observations])


def test_facts_and_options_reach_the_client(monkeypatch):
    monkeypatch.setenv("SOMASPEED_TOKEN", "a token of twenty")
    options = parser().parse_args(["run", "--name", "image=top", "--prompt", "stay", "--max_batch", "2"])
    with running(make_server(Still(), options)) as port:  # type: ignore[arg-type]
        client = Client(port, additional_headers={"Authorization": "Api-Key a token of twenty"})
        assert client.metadata == {
            "model": "pi05",
            "cameras": ["observation.images.top"],
            "state": ["x", "y"],
            "actions": ["x", "y"],
            "horizon": 2,
            "frames_per_second": 10.0,
        }
        answer = client.infer({"observation/image": PICTURE, "observation/state": [3.0, 4.0]})
        np.testing.assert_array_equal(answer["actions"], [[3, 4], [3, 4]])


def test_a_signal_ends_it():
    server = make_server(Still(), parser().parse_args(["run", "--max_batch", "1"]))  # type: ignore[arg-type]

    async def serve_then_terminate():
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(run_until_stopped(server, "127.0.0.1", 0), timeout=10)

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(serve_then_terminate())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "0 answered, 0 refused, 0 failed" in server.metrics.table()


def test_without_a_token_only_this_machine_is_served(monkeypatch):
    monkeypatch.delenv("SOMASPEED_TOKEN", raising=False)
    options = parser().parse_args(["run"])
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    with pytest.raises(ValueError, match="set a token"):
        asyncio.run(make_server(Still(), options).run("0.0.0.0", 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["image", "=top", "image="])
def test_a_name_that_maps_nothing_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "--name", name])
    assert "expected THEIRS=OURS" in capsys.readouterr().err
