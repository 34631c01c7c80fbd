"""No module imports itself by way of others, inside functions or out of them."""

import graphlib

import grimp


def test_no_import_goes_round_in_a_circle() -> None:
    graph = grimp.build_graph("tandem", "services")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
