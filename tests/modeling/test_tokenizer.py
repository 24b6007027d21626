import pytest

from infembed_ray.modeling.tokenizer import render


@pytest.mark.parametrize(
    ("template", "text"),
    [("instruction_first", "I Q"), ("query_first", "Q I"), ("instruct_query", "Instruct: I\nQuery: Q")],
)
def test_each_template_joins_instruction_and_query_its_way(template, text):
    assert render(template, "I", "Q") == text
    assert render(template, None, "Q") == render(template, "", "Q") == "Q"
