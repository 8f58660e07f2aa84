"""The widgets' modules become one text that fetches nothing."""

import re

import pytest

from tests.helpers.package_source import REPO
from workbench.widgets.dashboard import DashboardWidget
from workbench.widgets.js_bundle import STATIC, joined


def modules(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return folder


def test_a_module_follows_its_imports_and_sees_no_other_names(tmp_path):
    modules(
        tmp_path,
        a='import { two } from "./b.js";\nimport {\n  one,\n} from "./c.js";\n'
        "const own = 1;\nexport default { own, one };\n",
        b='import { one } from "./c.js";\nconst own = 2;\nexport function two() {\n  return own + one;\n}\n',
        c="export const one = 1;\n",
    )
    text = joined("a.js", tmp_path)
    places = [text.index(f"const ${name} = ") for name in "cba"]
    assert places == sorted(places)
    assert text.count("const $c = ") == 1
    assert re.findall(r"^(?:import|export)\b.*", text, re.MULTILINE) == ["export default $a.default;"]


def test_named_exports_are_exported_by_the_bundle(tmp_path):
    text = joined(
        "a.js", modules(tmp_path, a="export const one = 1;\nexport class Two {}\nexport function* three() {}\n")
    )
    assert text.endswith("export const { one, Two, three } = $a;\n")


def test_modules_may_be_in_folders_with_equal_names(tmp_path):
    for name, text in {
        "a.js": 'import { one } from "./b/a.js";\nexport const three = one;\n',
        "b/a.js": 'import { two } from "../c/a.js";\nexport const one = two;\n',
        "c/a.js": "export const two = 2;\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    text = joined("a.js", tmp_path)
    assert [text.index(line) for line in ("const $c$a = ", "const { two } = $c$a;", "const { one } = $b$a;")] == sorted(
        text.index(line) for line in ("const $c$a = ", "const { two } = $c$a;", "const { one } = $b$a;")
    )
    assert text.count("const $b$a = ") == 1


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a": 'import { x } from "./b.js";\n', "b": "const x = 1;\n"}, "a.js imports x from b.js"),
        (
            {"a": 'import { b } from "./b.js";\n', "b": 'import { a } from "./a.js";\n'},
            "circular import: a.js -> b.js -> a.js",
        ),
        ({"a": 'import * as b from "./b.js";\n', "b": ""}, "unsupported import or export"),
        ({"a": 'import b from "https://elsewhere/b.js";\n'}, "unsupported import or export"),
        ({"a": "const x = 1;\nexport { x };\n"}, "unsupported import or export"),
    ],
)
def test_modules_that_cannot_be_joined_are_reported(tmp_path, texts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        joined("a.js", modules(tmp_path, **texts))


def test_the_widgets_program_is_one_self_contained_module():
    text = str(DashboardWidget._esm)
    # a page uses the first; if a module exports `render` itself, anywidget warns that this is the old way
    assert re.findall(r"^export (.*) =|^export default", text, re.MULTILINE) == ["const { showDashboard }", ""]
    assert not re.search(
        r"^import |innerHTML|outerHTML|insertAdjacentHTML|https?://|\beval\(|document\.write", text, re.MULTILINE
    )


def test_the_wheel_takes_the_modules_along():
    """Hatch includes every file of the package that git does not ignore."""
    ignored = (REPO / ".gitignore").read_text().split()
    assert not any(pattern in {"*.js", "static", "static/"} for pattern in ignored)
    found = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*")}
    assert found >= {"events.js", "timeline/timeline.js", "views/head.js", "dashboard.js", "dashboard.css"}
