"""Chat templates in the shapes that decide what of an earlier turn is known, written for these tests."""

LAST_QUESTION = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n' }}{% endif %}{{ tools | tojson }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(is_open=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.is_open and message.role == "user" and message.content is string
        and not (message.content.startswith('<out>') and message.content.endswith('</out>')) %}
        {%- set ns.is_open = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>' ~ call.name ~ (call.arguments | tojson) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<out>\\n' + content + '\\n</out>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

MACROS = """\
[begin]
{%- set count = namespace(texts=0) %}
{%- macro shown(content, is_counted) -%}
    {%- if is_counted %}{%- set count.texts = count.texts + 1 %}{%- endif %}
    {%- if content is string %}{{- content | trim }}
    {%- else %}{%- for part in content %}{{- part.text if part is mapping else part }}{%- endfor %}{%- endif %}
{%- endmacro -%}
{%- set ns = namespace(last=-1) %}
{%- set talk = messages %}
{%- if messages[0].role == 'system' %}{%- set talk = messages[1:] %}
    {{- '<|im_start|>' + shown(messages[0].content, false) }}{%- endif %}
{%- for m in talk %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in talk %}
    {%- set content = shown(m.content, true) | trim %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>' }}{%- endif %}
        {{- 'out ' ~ content }}
        {%- if not loop.last and loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' ~ m.role ~ count.texts ~ '\\n' }}
        {%- if m.role == 'assistant' and ns.last < loop.index0 and m.reasoning_content %}
            {{- '<think>' ~ m.reasoning_content ~ '</think>' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- for name, value in call.function.arguments.items() %}{{- name ~ '=' ~ (value | tojson) }}{%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' ~ count.texts }}{%- endif %}
"""

CARRIED = """\
{%- set ns = namespace(is_first=true, system='', is_tool=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token ~ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<|im_start|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if not ns.is_tool and '</think>' in content %}
            {%- set content = content.split('</think>', 1)[1] %}
        {%- endif %}
        {{- content + '<|im_end|>' }}
        {%- for call in message['tool_calls'] or [] %}
            {%- if ns.is_first %}{{- '<first>' }}{%- set ns.is_first = false %}{%- endif %}
            {{- call['function']['name'] + '<|im_end|>' }}
        {%- endfor %}
        {%- set ns.is_tool = false %}
    {%- elif message['role'] == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<|im_start|>out' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<|im_start|>' }}{%- endif %}
"""

ALTERNATING = """\
{{ bos_token }}{{ strftime_now('%Y') }}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = messages[0]['content'] + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set prefix = '' %}{%- endif %}
{%- set said = namespace(number=0) %}
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant'] and not message.tool_calls %}
        {%- if (message.role == 'user') != (said.number % 2 == 0) %}{{- raise_exception('must alternate') }}{%- endif %}
        {%- set said.number = said.number + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (prefix if loop.first else '') + message.content | trim }}
    {%- if loop.index0 % 2 and message.name is defined %}{{- message.name }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}
"""

LOOKAHEAD = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>' ~ messages[0].content }}{%- set talk = messages[1:] %}
{%- else %}{%- set talk = messages %}{%- endif %}
{{- tools | tojson if tools else '' }}
{%- set last_call = namespace(name=none) %}
{%- for message in talk %}
    {%- if message.role == 'assistant' %}
        {%- if 'tool_calls' in message %}
            {%- set final = namespace(found=false) %}
            {%- for later in talk[loop.index:] %}
                {%- if later.role == 'assistant' and 'tool_calls' not in later %}
                    {%- set final.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- if message.content and not final.found %}{{- '<|im_start|>thought' + message.content }}{%- endif %}
            {%- set last_call.name = message.tool_calls[0].function.name %}
            {{- '<|im_start|>to=' + last_call.name + (message.tool_calls[0].function.arguments | tojson) }}
        {%- else %}
            {{- '<|im_start|>final' + message.content }}
            {%- set last_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if last_call.name is none %}{{- raise_exception('no call before a result') }}{%- endif %}
        {{- '<|im_start|>' + last_call.name + message.content | tojson }}
    {%- else %}
        {{- '<|im_start|>user' + message.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}
"""
