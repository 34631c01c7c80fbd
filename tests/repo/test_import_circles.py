"""No module imports itself by way of others, inside functions or out of them."""

import graphlib

import grimp

KNOWN = {("tandem.serving.discovery", "tandem.serving.discovery_redis")}  # (who imports, what), within a function


def test_no_import_goes_round_in_a_circle() -> None:
    graph = grimp.build_graph("tandem", "services")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for module, imported in KNOWN:
        imports[module] = imports[module] - {imported}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
