"""What pyproject.toml cannot say: a line that every Python of the environment reads when it starts lies beside the packages.

``pip install`` and ``pip install --editable`` both put ``ckptsync-autoload.pth`` there, and remove it with the rest.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithLine(build_py):
    """Copies ``ckptsync/hooks/autoload.pth`` to the root of the wheel; an editable one is made where `install` would put its files."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        root = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file("ckptsync/hooks/autoload.pth", f"{root}/ckptsync-autoload.pth", preserve_mode=False)


setup(cmdclass={"build_py": WithLine})
