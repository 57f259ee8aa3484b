"""Chat templates written with the means that those of today's models use."""

# ruff: noqa: E501
from __future__ import annotations

# As Qwen3's: a search backwards for the last question, thoughts cut out of earlier answers, tools as JSON.
THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n{"name": <name>, "arguments": <object>}<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string and not(
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Llama 3.1's: the date, indented JSON, errors raised by the template.
INDENTED = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b') %}
    {%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- 'You have the functions:\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "%s", ' % tool_call.name }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# As gpt-oss's: macros that call themselves over a JSON schema, lists that grow, filters with arguments.
MACROS = """
{%- macro render_type(spec, required) -%}
    {%- if spec.type == 'array' -%}
        {%- if spec['items'] -%}{{- render_type(spec['items'], required) + '[]' -}}{%- else -%}any[]{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(' | ') -}}
    {%- elif spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type == 'object' and spec.properties -%}
        {{- '{\\n' -}}
        {%- for name, value in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}?{%- endif -%}
            {{- ': ' -}}{{- render_type(value, spec.required or []) -}}{%- if not loop.last -%}, {%- endif -%}
        {%- endfor -%}
        {{- '}' -}}
    {%- else -%}{{- {'string': 'string', 'integer': 'number'}.get(spec.type, 'any') -}}{%- endif -%}
{%- endmacro -%}
{%- macro render_tools(name, tools) -%}
    {{- '## ' + name + '\\n\\nnamespace ' + name + ' {\\n\\n' }}
    {%- for tool in tools | map(attribute='function') | list %}
        {{- '// ' + (tool.description or '')|replace('\\n', ' ')|truncate(200) + '\\n' -}}
        {{- 'type ' + tool.name + ' = (_: ' + render_type(tool.parameters, []) + ') => any;\\n\\n' }}
    {%- endfor %}
    {{- '} // namespace ' + name }}
{%- endmacro -%}
{%- set ns = namespace(roles=[], last_tool=none, text='') -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m') + '\\n\\nReasoning: ' }}
{{- reasoning_effort | default('medium') }}{{- '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' ~ render_tools('functions', tools) ~ '<|end|>' }}{%- endif %}
{%- for message in messages -%}
    {%- set ns.roles = ns.roles + [message.role] -%}
    {%- if message.role == 'assistant' -%}
        {%- set future = namespace(found=false) %}
        {%- for later in messages[loop.index:] if later.role == 'assistant' and 'tool_calls' not in later %}
            {%- set future.found = true %}{%- break %}
        {%- endfor %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}{%- set ns.last_tool = call.name %}
            {{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
            {{- call.arguments|tojson }}{{- '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if ns.last_tool is none %}{{- raise_exception('Message has tool role, but no call was made') }}{%- endif %}
        {{- '<|start|>functions.' + ns.last_tool }}{{- ' to=assistant<|message|>' + message.content|tojson + '<|end|>' }}
    {%- else -%}
        {%- set text %}{{ message.content | trim }}{% endset -%}
        {{- '<|start|>' ~ message.role ~ '<|message|>' ~ text ~ '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{{- ns.roles | unique | sort | join(',') }}{{- messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif -%}
"""

# As Gemma 3's: turns must alternate, the system message goes into the first of them.
ALTERNATING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

TEMPLATES = {"thinking": THINKING, "indented": INDENTED, "macros": MACROS, "alternating": ALTERNATING}
