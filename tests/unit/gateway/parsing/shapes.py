"""Chat templates in shapes that tool-calling and thinking checkpoints ship, written for these tests."""

from tests.unit.text import templates

LLAMA = templates.HEADERS.replace(
    "{%- generation %}", "{%- generation %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)

LISTED = templates.INSTRUCTIONS.replace('"[TOOL_CALLS]["', '"[TOOL_CALLS]"').replace(
    'list | tojson) + "]"', "list | tojson)"
)

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer a call as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content is defined %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

OPENING = QWEN.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    "{{- '<think>\\n' }}",
)

HYBRID = """\
{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{{- bos_token }}
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' + ('<think>' if thinking else '</think>') }}{%- endif %}
"""

NAMED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if message.reasoning_content is defined %}
            {{- '[THINK]' + message.reasoning_content + '[/THINK]' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
"""

PYTHONIC = """\
{{- bos_token }}
{%- if tools %}
    {{- 'Call functions as [func_name1(params_name1=params_value1), func_name2(params)].\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=2) + '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
    {%- if message.tool_calls is defined %}
        {{- '[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + '=' + value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
"""
