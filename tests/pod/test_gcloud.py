"""Every call is an argument list; what reaches a worker's shell arrives as it was written."""

import json
import shlex

import pytest
from specs import make_spec
from stand_in import Cloud

from tinypod.errors import UserError
from tinypod.pod import gcloud as module
from tinypod.pod.gcloud import Gcloud, GcloudError, GcloudTimeout, NoCapacity, NotFound, redacted

HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "a'b\"c",
    "x\ntouch pwned",
    "--worker=all",
    "&& false",
    "é×",
]


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_arrive_unchanged(cloud: Cloud, gcloud: Gcloud, word: str) -> None:
    gcloud.create_node()
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    said = gcloud.ssh(0, ["python3", "-c", show, word, word])
    assert json.loads(said or "") == [word, word]
    assert not list(cloud.folder.rglob("pwned"))


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.parametrize("key", ["project", "zone", "name", "type", "runtime_version", "service_account"])
def test_hostile_words_are_no_names(key: str, word: str) -> None:
    """What is named in a spec is checked, so that none can pass for a flag either."""
    with pytest.raises(UserError, match=key):
        make_spec(**{key: word})


def test_the_commands_are_gcloud_s(cloud: Cloud) -> None:
    """The stand-in refuses whatever gcloud's reference does not list."""
    disk = {"name": "puzzles", "mode": "read-only"}
    more = {"service_account": "a@p.iam.gserviceaccount.com", "disk": disk, "internal_ip": True}
    Gcloud(make_spec(type="v5e-8", request={"kind": "spot"}, **more)).create_node()
    request = {"kind": "queued", "spot": True, "valid_hours": 1.5}
    Gcloud(make_spec(request=request, **more)).create_request()
    node, queued = cloud.calls()
    everywhere = ["--project=my-project", "--zone=us-central2-b", "--quiet"]
    shape = ["--service-account=a@p.iam.gserviceaccount.com"]
    shape += [
        "--data-disk=source=projects/my-project/zones/us-central2-b/disks/puzzles,mode=read-only",
        "--internal-ips",
    ]
    of_a_node = ["--version=v2-alpha-tpuv5-lite", "--accelerator-type=v5litepod-8", *shape, "--spot"]
    assert node == ["compute", "tpus", "tpu-vm", "create", "trainer", *of_a_node, *everywhere]
    of_a_request = ["--node-id=trainer", "--runtime-version=tpu-ubuntu2204-base", "--accelerator-type=v4-16", *shape]
    of_a_request += ["--spot", "--valid-until-duration=5400s", "--async"]
    assert queued == ["compute", "tpus", "queued-resources", "create", "trainer", *of_a_request, *everywhere]


def test_dry_run_prints_and_runs_nothing(cloud: Cloud) -> None:
    shown: list[str] = []
    dry = Gcloud(make_spec(), dry_run=True, show=shown.append)
    dry.create_node()
    assert dry.describe_node() is None
    assert dry.ssh(1, ["echo", "a b"]) is None
    assert cloud.calls() == []
    assert shlex.split(shown[0])[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "create"]
    assert "--command=echo 'a b'" in shlex.split(shown[2])


def test_errors_quote_gcloud_and_say_what_to_do(cloud: Cloud, gcloud: Gcloud) -> None:
    assert gcloud.describe_node() is None
    with pytest.raises(NotFound, match=r"gcloud tpu-vm delete trainer ended with exit code 1:\n.*was not found"):
        gcloud.delete_node()
    cloud.order(lacking=1)
    with pytest.raises(NoCapacity, match=r"no more capacity in the zone(.|\n)*kind: queued"):
        gcloud.create_node()
    cloud.order(fail="Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 64 in region x")
    with pytest.raises(NoCapacity, match=r"quota is used up(.|\n)*--dead"):
        gcloud.create_node()
    cloud.order(fail="Please run:\n  $ gcloud auth login")
    with pytest.raises(GcloudError, match="Sign in with `gcloud auth login`"):
        gcloud.create_node()


def test_a_call_that_hangs_has_a_deadline(cloud: Cloud, gcloud: Gcloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.order(hang="describe")
    monkeypatch.setattr(module, "DESCRIBE_TIMEOUT_S", 0.5)
    with pytest.raises(GcloudTimeout, match=r"gcloud tpu-vm describe trainer did not end within 0.5 s") as caught:
        gcloud.describe_node()
    assert caught.value.exit_code == 76


def test_without_gcloud(gcloud: Gcloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="gcloud is not installed"):
        gcloud.describe_node()


def test_credentials_are_not_logged(cloud: Cloud, gcloud: Gcloud) -> None:
    cloud.order(fail="request failed\nAuthorization: Bearer ya29.a0AfB_secret-token\n")
    with pytest.raises(GcloudError) as caught:
        gcloud.describe_node()
    assert "secret" not in str(caught.value)
    assert "request failed" in str(caught.value)
    assert redacted('{"private_key": "-----BEGIN PRIVATE KEY-----MIIE-----"}').count("MIIE") == 0
