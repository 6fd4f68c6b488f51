"""The compilers of TPUs and GPUs, in a process of their own: they need no such device, take minutes, and may end the
process they are in.

The parent sends a config and a topology as JSON; the child builds the experiment for the topology's devices, compiles
its step and answers with an Analysis. Where XLA's GPU compiler is not installed, or fails, the CPU's compiler stands in
for it, and the Analysis says so. Ctrl-C in the parent ends the child at once, and so does the parent's own end.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinypod.cluster.children import with_parent
from tinypod.errors import ConfigError, DataError, DeadlineError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.planning import gpus
from tinypod.planning.analysis import Analysis
from tinypod.planning.gpus import Cards
from tinypod.planning.hardware import Hardware

TIMEOUT_S = 3600.0
_ANSWER = "TINYPOD_ANSWER "
Places = Sequence[tuple[int, ...]]  # of devices that do not say where they are
# The child must not look for a TPU, nor wait for the metadata server of a Cloud machine, nor mind other processes that
# have the library open.
ALONE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def compiler_version(target: Hardware | None = None) -> str:
    """Of the compiler for it, or for TPUs, as it is installed; an error that says how to install that of TPUs if there
    is none. GPUs do without theirs."""
    if isinstance(target, Cards):
        return cuda_version() or "the CPU's"
    library, package = os.environ.get("TPU_LIBRARY_PATH"), find_spec("libtpu")
    # JAX sets the variable itself, to the package's own, when it is imported.
    if library and not (package and package.origin and Path(library).parent == Path(package.origin).parent):
        return f"{library} of {os.path.getmtime(library):.0f}" if os.path.exists(library) else _missing(library)
    if package is None:
        return _missing("libtpu is not installed")
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return "unknown"


def cuda_version() -> str | None:
    for plugin in ("jax-cuda13-pjrt", "jax-cuda12-pjrt"):
        try:
            return f"{plugin} {version(plugin)}"
        except PackageNotFoundError:
            continue
    return None


def _missing(what: str) -> str:
    raise UserError(
        f"planning for TPU slices needs the TPU compiler ({what}): install the extra `plan`, pip install "
        "'tinypod[plan]' (in a clone: pip install -e '.[plan]'). It needs no TPU. `--slice local` plans for this "
        "machine's device without it"
    )


def compile_for(
    config: ExperimentConfig,
    target: Hardware,
    *,
    tick: Callable[[float], None] = lambda seconds: None,
    timeout_s: float = TIMEOUT_S,
) -> Analysis:
    """Compile the config's step for the slice. `tick` is called now and then with the seconds that it has taken."""
    cards = target.name if isinstance(target, Cards) else None
    topology = target.topology_arguments()
    request = json.dumps({"config": config.model_dump(mode="json"), "topology": topology, "cards": cards})
    out, err, code = _ask(request, target.name, tick, timeout_s)
    answers = [line for line in out.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        raise UserError(f"the compiler ended with code {code} while compiling for {target.name}:\n{_last(err)}")
    answer = json.loads(answers[-1].removeprefix(_ANSWER))
    if "error" in answer:
        raise {"ConfigError": ConfigError, "DataError": DataError}.get(answer["kind"], UserError)(answer["error"])
    return Analysis.model_validate(answer)


def start_child() -> subprocess.Popen[str]:
    """The compiler's process, which waits for a request on its stdin."""
    return subprocess.Popen(
        with_parent([sys.executable, "-m", "tinypod.planning.compiler", str(os.getpid())]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | ALONE,
    )


def _ask(request: str, name: str, tick: Callable[[float], None], timeout_s: float) -> tuple[str, str, int]:
    """What the child printed, on stdout and stderr, and its exit code."""
    began, sent = time.monotonic(), request
    with start_child() as child:
        try:
            while True:
                try:
                    return *child.communicate(sent, timeout=0.5), child.returncode
                except subprocess.TimeoutExpired:
                    sent = ""  # it has the request
                waited = time.monotonic() - began
                tick(waited)
                if waited > timeout_s:
                    raise DeadlineError(f"compiling for {name} took longer than {timeout_s:.0f} s and was given up")
        finally:
            child.kill()


def _last(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:]) or "(it printed nothing)"


def _end_with(parent: int) -> None:
    """Where the kernel does not do it: a parent that was killed does not come back for the answer."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve() -> None:
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    import jax

    request = json.load(sys.stdin)
    jax.config.update("jax_enable_compilation_cache", False)  # what it compiles for absent devices cannot be read back
    try:
        config = ExperimentConfig.model_validate(request["config"])
        cards, topology = gpus.find_cards(request["cards"] or ""), request["topology"]
        made = _compile_for(config, topology) if cards is None else _compile_for_cards(config, topology, cards)
        answer = made.model_dump_json()
    except UserError as error:
        answer = json.dumps({"error": str(error), "kind": type(error).__name__})
    print(f"\n{_ANSWER}{answer}", flush=True)


def _compile_for(config: ExperimentConfig, topology: dict[str, Any], places: Places | None = None) -> Analysis:
    from jax.experimental import topologies

    return _analyse(config, topologies.get_topology_desc(**topology).devices, places)


def _compile_for_cards(config: ExperimentConfig, topology: dict[str, Any], cards: Cards) -> Analysis:
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    jax.config.update("jax_num_cpu_devices", cards.devices)  # before anything asks for them
    why = "XLA's GPU compiler is not installed: pip install 'tinypod[cuda]' (it needs no GPU)"
    if cuda_version() is not None:
        card = AbstractDevice(device_kind=cards.generation.device_kind, num_cores=None, platform="gpu")
        try:
            with use_abstract_mesh(AbstractMesh((), (), abstract_device=card)):  # kernels ask for what they are
                return _compile_for(config, topology, cards.places)
        except UserError:
            raise
        except Exception as error:  # whatever it is: kernels that it refuses, a plugin that does not load
            why = f"XLA's GPU compiler failed: {str(error).strip().partition(chr(10))[0][:200]}"
    return _analyse(config, jax.devices("cpu"), cards.places).model_copy(update={"stand_in": why})


def _analyse(config: ExperimentConfig, devices: Sequence[Any], places: Places | None) -> Analysis:
    from tinypod.experiment import build
    from tinypod.planning.analysis import analyse

    return analyse(build(config, devices, planned=True), places)[0]


if __name__ == "__main__":
    _serve()
