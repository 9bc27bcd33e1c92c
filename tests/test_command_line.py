"""The command line and its model specs, run as a user runs them."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import autobd
from autobd.cli import main
from autobd.errors import InputError, SpecError
from autobd.specs import load_model

MODELS = """
import torch
from torch import nn

def net(width=8, name="x"):
    block = lambda i, o: nn.Sequential(nn.Linear(i, width), nn.ReLU(), nn.Linear(width, o))
    return nn.Sequential(block(6, 6), block(6, 6))

def data():
    return [torch.randn(4, 6) for _ in range(3)]

def held_out():
    import autobd
    return autobd.Validation([torch.randn(4, 6)], {"size": lambda output, targets: output.abs().mean()})

number = 3
"""


@pytest.fixture
def models(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


def test_specs_of_every_form(models):
    assert load_model(f"{models}:net,width=3")[0][0].out_features == 3
    assert load_model("timm:resnet10t,num_classes=7").num_classes == 7
    assert load_model("torchvision:resnet18,num_classes=7").fc.out_features == 7
    conv = load_model("torch.nn:Conv2d,in_channels=2,out_channels=3,kernel_size=(3,5),padding_mode=zeros")
    assert conv.kernel_size == (3, 5)
    assert load_model("hf:BertModel,num_hidden_layers=1,hidden_size=24").config.hidden_size == 24


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm:resnet1O", "perhaps resnet"),
        ("torchvision:resnet17", "perhaps resnet18"),
        ("resnet18", "Not a model spec"),
        ("no.such.module:net", "no module 'no.such.module'"),
        ("torch.nn:Lineer", "perhaps Linear"),
        ("models.py:net", "There is no file"),
        ("torch.nn:Linear,3", "not key=value"),
        ("torch:zeros,size=(3,)", "does not make a model"),
        ("hf:LlamaForCasualLM", "perhaps .*LlamaForCausalLM"),
    ],
)
def test_wrong_specs_name_the_nearest_matches(spec, message):
    with pytest.raises(SpecError, match=message):
        load_model(spec)


def test_wrong_arguments_of_a_spec(models):
    with pytest.raises(InputError, match=r"widht[\s\S]*among: width, name"):
        load_model(f"{models}:net,widht=3")
    with pytest.raises(SpecError, match="cannot be called"):
        load_model(f"{models}:number")


def test_inspect_prints_the_block_table(models, capsys):
    assert main(["inspect", f"{models}:net,width=32", f"{models}:net", "--input", "6", "--cut", "0=0", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "2 blocks" in printed
    assert "identical" in printed
    assert main(["inspect", "torchvision:resnet18", "torchvision:resnet18", "--blocks", "3"]) == 0
    assert "N x 1000" in capsys.readouterr().out


def test_distill_trains_and_writes_the_student(models, capsys, tmp_path):
    out = tmp_path / "student.pt"
    command = [
        "distill",
        f"{models}:net,width=32",
        f"{models}:net",
        "--data",
        f"{models}:data",
        "--epochs",
        "2",
        "--quiet",
    ]
    assert main([*command, "--output", str(out)]) == 0
    assert "6 steps, 2 epochs" in capsys.readouterr().out
    load_model(f"{models}:net").load_state_dict(torch.load(out, weights_only=True))


def test_distill_judges_and_finishes(models, capsys, tmp_path):
    from safetensors.torch import load_file

    out = tmp_path / "student.safetensors"
    command = ["distill", f"{models}:net,width=32", f"{models}:net", "--data", f"{models}:data", "--quiet"]
    more = ["--validate", f"{models}:held_out", "--finish", "1", "--block-input", "student", "--precision", "bf16"]
    assert main([*command, *more, "--output", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("assembled", "finished", "teacher", "end to end: 3 steps"))
    load_model(f"{models}:net").load_state_dict(load_file(out))


def test_distill_goes_on_from_a_checkpoint(models, capsys, tmp_path):
    command = ["distill", f"{models}:net,width=32", f"{models}:net", "--data", f"{models}:data", "--quiet"]
    command += ["--epochs", "2", "--checkpoint", str(tmp_path / "runs"), "--every", "2 steps"]
    assert main(command) == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {f"step-{step:08}" for step in (2, 4, 6)}
    assert main(command) == 1
    assert "has checkpoints of an earlier training" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert "went on from" in capsys.readouterr().out


def test_an_error_is_one_message_and_status_1(models, capsys):
    assert main(["inspect", "timm:nothing", f"{models}:net"]) == 1
    assert capsys.readouterr().err.startswith("autobd: timm has no model 'nothing'.")
    assert main(["inspect", f"{models}:net", f"{models}:net"]) == 1
    assert "--input" in capsys.readouterr().err


def test_python_dash_m_and_version():
    done = subprocess.run([sys.executable, "-m", "autobd", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("autobd 0.")


def test_importing_autobd_loads_no_model_library():
    code = "import sys, autobd; print(sorted({'timm', 'torchvision', 'transformers', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_progress_is_silent_when_asked(models, capsys):
    import autobd

    autobd.distill(load_model(f"{models}:net"), load_model(f"{models}:net"), torch.randn(8, 6), progress=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    autobd.distill(load_model(f"{models}:net"), load_model(f"{models}:net"), torch.randn(8, 6))
    assert "relative loss" in capsys.readouterr().err


def test_demo_prints_tables_and_beats_an_untrained_student(capsys, monkeypatch):
    from autobd import demo

    for name, epochs in (("TEACHER_EPOCHS", 2), ("BLOCKWISE_EPOCHS", 2), ("FINISH_EPOCHS", 1)):
        monkeypatch.setattr(demo, name, epochs)
    done = demo.run(progress=False)
    printed = capsys.readouterr().out
    for name in ("teacher", "student, untrained", "student, assembled", "student, finished end to end", "scratch"):
        assert name in printed
    assert done.accuracy["student, finished end to end"] > done.accuracy["student, untrained"] + 0.3
    assert done.passes["same student from scratch"] == done.passes["student, finished end to end"] == 3


def test_inspect_explains_itself_and_speaks_json(capsys):
    pair = ["inspect", "torchvision:resnet18", "timm:resnet10t", "--batch-size", "2", "--input", "3x64x64"]
    assert main([*pair, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "places to cut" in text
    assert "numbers of blocks" in text
    assert main([*pair, "--json", "--blocks", "3", "--adapters", "matched"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert len(values["blocks"]) == 3
    for block in values["blocks"]:
        for side in ("teacher", "student"):
            assert {"modules", "returns", "parameter_count", "flops", "activation_bytes"} <= set(block[side])
    assert main([*pair, "--json", "--explain", "--verify"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert "places to cut" in values["explanation"]
    assert "gradients" in values["verification"]
    whole = load_model("torchvision:resnet18")
    assert sum(b["teacher"]["parameter_count"] for b in values["blocks"]) == sum(p.numel() for p in whole.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_inspecting_a_model_of_seven_billion_weights_takes_no_memory_for_them():
    script = (
        "import re; from autobd.cli import main\n"
        "assert main(['inspect', 'hf:LlamaForCausalLM', 'hf:LlamaForCausalLM,num_hidden_layers=8', '--json']) == 0\n"
        # Not ru_maxrss: a started program inherits that of the process that started it.
        "peak = 1024 * int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
        "assert peak < 2 * 2**30, peak\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert 6.7e9 < sum(b["teacher"]["parameter_count"] for b in json.loads(done.stdout)["blocks"]) < 6.8e9


def test_models_without_weights_are_not_trained():
    with torch.device("meta"):
        teacher, student = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(InputError, match=r"meta device(.|\n)*outside of torch.device"):
        autobd.distill(teacher, student, [torch.randn(2, 3)], progress=False)
