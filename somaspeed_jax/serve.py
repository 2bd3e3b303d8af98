"""Serves a trained policy to robots: `python -m somaspeed_jax.serve runs/my-robot`.

The robot talks to it with openpi-client, unchanged:

    from openpi_client.websocket_client_policy import WebsocketClientPolicy
    policy = WebsocketClientPolicy("127.0.0.1", 8000)
    actions = policy.infer({"observation/top": picture, "observation/state": state, "prompt": "reach the red block"})

Actions come back as float32 [t, a] in robot units. `GET /metrics` has latency histograms, `GET /healthz` says OK once
the policy is warm. The server listens on this machine alone unless a token is set (environment SOMASPEED_TOKEN).
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING

from somaspeed_jax.serving.server import PolicyServer

if TYPE_CHECKING:
    from somaspeed_jax.policy import TrainedPolicy


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("somaspeed_jax").setLevel(logging.INFO)
    from somaspeed_jax.policy import load_policy  # starts jax

    server = make_server(load_policy(options.run, dataset=options.dataset), options)
    print(f"warming up, then listening on ws://{options.host}:{options.port}", flush=True)
    asyncio.run(run_until_stopped(server, options.host, options.port))
    print(server.metrics.table(), flush=True)


async def run_until_stopped(server: PolicyServer, host: str, port: int) -> None:
    """Serves until the process is interrupted or asked to terminate."""
    serving = asyncio.ensure_future(server.run(host, port))
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def make_server(policy: "TrainedPolicy", options: argparse.Namespace) -> PolicyServer:
    facts = policy.facts
    return PolicyServer(
        policy.act_batch,
        cameras=facts.cameras,
        state_dim=len(facts.state_names),
        metadata={
            "model": policy.config.model.name,
            "cameras": facts.cameras,
            "state": facts.state_names,
            "actions": facts.action_names,
            "horizon": policy.horizon,
            "frames_per_second": facts.fps,
        },
        max_batch=options.max_batch,
        token=os.environ.get("SOMASPEED_TOKEN", ""),
        max_bytes=options.max_megabytes * 2**20,
        names=dict(options.name),
        default_prompt=options.prompt,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("somaspeed_jax.serve", description="A websocket server for a trained policy.")
    made.add_argument("run", help="the workdir of a run that has saved")
    made.add_argument("--dataset", default="", help="which dataset of a mixture the robot is of")
    made.add_argument("--host", default="127.0.0.1", help="any other needs SOMASPEED_TOKEN (default: %(default)s)")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--max_batch", type=int, default=8, help="observations answered together, a power of two")
    made.add_argument("--max_megabytes", type=int, default=16, help="of one message")
    made.add_argument("--prompt", default="", help="the task of messages that have none")
    made.add_argument(
        "--name",
        action="append",
        default=[],
        type=_pair,
        metavar="THEIRS=OURS",
        help="a client's name for a camera or the state, and ours: wrist_image=wrist; may be repeated",
    )
    return made


def _pair(text: str) -> tuple[str, str]:
    theirs, equals, ours = text.partition("=")
    if not (theirs and equals and ours):
        raise argparse.ArgumentTypeError(f"{text!r}, expected THEIRS=OURS")
    return theirs, ours


if __name__ == "__main__":
    main()
