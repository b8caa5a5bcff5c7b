"""The compiler half of the stub: it exists so that Triton can register the backend, and refuses to compile."""

# The module, not the class: Triton looks for exactly one subclass of BaseBackend among the names here.
from triton.backends import compiler as _compiler


class InterpretedBackend(_compiler.BaseBackend):
    """Supports the target `cpu` and nothing else."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "domino-interpreted"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language=None):
        raise RuntimeError("this Triton backend compiles nothing: run with TRITON_INTERPRET=1")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
