"""The plugin in a process of its own: it imports no runner, and a runner that is imported comes patched."""

import subprocess
import sys

CODE = """
import sys
from vllm_domino.plugin.register import register
names = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.rejection_sampler")
register()
register()
assert not [name for name in names if name in sys.modules]
import vllm.v1.worker.gpu.model_runner as v2, vllm.v1.worker.gpu_model_runner as v1
import vllm.v1.sample.rejection_sampler as sampler
patched = v2.init_speculator, v1.GPUModelRunner.__init__, sampler.expand_batch_to_tokens
print([function.__module__ for function in patched])
"""


def test_runners_are_patched_when_they_are_imported():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(["vllm_domino.plugin.patches"] * 3)
