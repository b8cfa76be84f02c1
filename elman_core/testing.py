"""Where the contract for plugins' tests was: it is in the package that has `elman check`."""

from .registry.installing import how_to_install, known

package = known("commands")["check"]
module = f"{package.replace('-', '_')}.testing"
raise ImportError(f"elman_core.testing is {module} now: import that; where it is missing: {how_to_install(package)}")
