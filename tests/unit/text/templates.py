"""Chat templates in the shapes that open checkpoints ship, written for these tests."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, seen=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is defined and message.reasoning_content is not none and ns.last == loop.index0 %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if message.content is string %}{{- message.content }}{%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- '<|' ~ part.type ~ '|>' }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' }}{{- call.function | tojson(indent=2) }}{{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
{% for t in tools %}
    {{ t | tojson(indent=4, sort_keys=true) }}

{% endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- generation %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

INSTRUCTIONS = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set turns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role in ["user", "assistant"] and not message.tool_calls %}
        {%- if (message.role == "user") != (turns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant, <not> \\"" + message.role + "\\"") }}
        {%- endif %}
        {%- set turns.index = turns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" + (message.tool_calls | map(attribute="function") | list | tojson) + "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

TURNS = """\
{{ bos_token }}
{%- macro say(role, text) -%}
<start_of_turn>{{ role }}
{{ text | trim }}<end_of_turn>
{% endmacro -%}
{% set prefix = '' -%}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set prefix = message['content'] %}
        {% if loop.length == 1 %}{% break %}{% endif %}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ say(role, prefix ~ message['content'] ~ pad_token) }}
{%- endfor %}
{% if documents %}{% for document in documents %}[{{ document['title'] }}: {{ document.text }}]{% endfor %}{% endif %}
{% if add_generation_prompt %}
{{'<start_of_turn>model
'}}
{%- endif %}
"""
