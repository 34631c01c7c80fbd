"""What happens inside Redis, each script at once or not at all. The same rules as `balance.Balance`.

Levels are parts of a token and money is nanos, both whole numbers below 2**53, so Lua's doubles hold them exactly; what
was spent is added up by HINCRBY, in 64-bit integers. Every script takes the time in milliseconds, or '' for Redis' own.
"""

# KEYS: state, open, held; then those of the script. ARGV[1]: now, or ''.
_COMMON = """
local PARTS = 60000
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local function whole(value) return string.format('%.0f', value) end
local function expire()
  for _, charge in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
    local cost = string.match(redis.call('HGET', KEYS[3], charge) or '0', '^%d+')
    redis.call('HINCRBY', KEYS[1], 'held', whole(0 - tonumber(cost)))
    redis.call('ZREM', KEYS[2], charge)
    redis.call('HDEL', KEYS[3], charge)
  end
end
local function levels_of(rates)
  local known = redis.call('HMGET', KEYS[1], 'at', 'l1', 'l2', 'l3')
  local at = tonumber(known[1]) or now
  local passed = math.max(0, now - at)
  local levels = {}
  for i = 1, 3 do
    local rate = tonumber(rates[i])
    levels[i] = rate and math.min(rate * PARTS, (tonumber(known[i + 1]) or rate * PARTS) + passed * rate) or 0
  end
  return levels, math.max(now, at)
end
local function keep(levels, at)
  redis.call('HSET', KEYS[1], 'at', whole(at), 'l1', whole(levels[1]), 'l2', whole(levels[2]), 'l3', whole(levels[3]))
end
"""

# KEYS: …, settled marker, revoked keys.
# ARGV: now, key, charge, lease, cost, budget, concurrency, three amounts, three rates; '' = no limit.
RESERVE = (
    _COMMON
    + """
if redis.call('SISMEMBER', KEYS[5], ARGV[2]) == 1 then return {'revoked', '0', '0', '0', '0', '0'} end
if redis.call('EXISTS', KEYS[4]) == 1 then return {'settled', '0', '0', '0', '0', '0'} end
expire()
local charge, cost = ARGV[3], tonumber(ARGV[5])
local rates, names = {ARGV[11], ARGV[12], ARGV[13]}, {'requests', 'input_tokens', 'output_tokens'}
local levels, at = levels_of(rates)
local money = redis.call('HMGET', KEYS[1], 'spent', 'held')
local left = math.max(0, (tonumber(ARGV[6]) or 0) - (tonumber(money[1]) or 0) - (tonumber(money[2]) or 0))
local why, wait = 'ok', 0
if ARGV[6] ~= '' and cost > left then
  why = 'budget'
elseif ARGV[7] ~= '' and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[7]) then
  why = 'concurrency'
else
  for i = 1, 3 do
    local rate = tonumber(rates[i])
    local missing = rate and tonumber(ARGV[7 + i]) * PARTS - levels[i] or 0
    if missing > 0 and why == 'ok' then why, wait = names[i], missing / rate end
  end
end
if why == 'ok' then
  for i = 1, 3 do
    if rates[i] ~= '' then levels[i] = levels[i] - tonumber(ARGV[7 + i]) * PARTS end
  end
  redis.call('HINCRBY', KEYS[1], 'held', ARGV[5])
  redis.call('ZADD', KEYS[2], whole(now + ARGV[4]), charge)
  redis.call('HSET', KEYS[3], charge, table.concat({ARGV[5], ARGV[8], ARGV[9], ARGV[10]}, ' '))
end
keep(levels, at)
return {why, tostring(wait), whole(left), whole(levels[1]), whole(levels[2]), whole(levels[3])}
"""
)

# KEYS: …, settled marker, ledger, totals of the day, days.
# ARGV: now, charge, marker's life, cost, whether granted, three reserved, three used, three rates, entry, most entries,
# day, who, the five counts of tokens, life of totals.
SETTLE = (
    _COMMON
    + """
if not redis.call('SET', KEYS[4], '1', 'NX', 'PX', ARGV[3]) then return 0 end
local charge, reserved = ARGV[2], {0, 0, 0}
local held = redis.call('HGET', KEYS[3], charge)
if held then
  local cost, a, b, c = string.match(held, '^(%d+) (%d+) (%d+) (%d+)$')
  reserved = {tonumber(a), tonumber(b), tonumber(c)}
  redis.call('HINCRBY', KEYS[1], 'held', whole(0 - tonumber(cost)))
  redis.call('ZREM', KEYS[2], charge)
  redis.call('HDEL', KEYS[3], charge)
elseif ARGV[5] == '1' then
  reserved = {tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])}
end
expire()
local levels, at = levels_of({ARGV[12], ARGV[13], ARGV[14]})
for i = 1, 3 do
  local rate = tonumber(ARGV[11 + i])
  if rate then
    levels[i] = math.max(0, math.min(rate * PARTS, levels[i] + (reserved[i] - tonumber(ARGV[8 + i])) * PARTS))
  end
end
keep(levels, at)
redis.call('HINCRBY', KEYS[1], 'spent', ARGV[4])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[16], '*', 'entry', ARGV[15])
local names = {'num_input', 'num_written_5m', 'num_written_1h', 'num_read', 'num_output'}
redis.call('HINCRBY', KEYS[6], ARGV[18] .. 'num_requests', 1)
redis.call('HINCRBY', KEYS[6], ARGV[18] .. 'cost_nanos', ARGV[4])
for i = 1, 5 do redis.call('HINCRBY', KEYS[6], ARGV[18] .. names[i], ARGV[18 + i]) end
redis.call('EXPIRE', KEYS[6], ARGV[24])
redis.call('ZADD', KEYS[7], 0, ARGV[17])
return 1
"""
)

# ARGV: now, lease, charges …
RENEW = (
    _COMMON
    + """
for i = 3, #ARGV do redis.call('ZADD', KEYS[2], 'XX', whole(now + ARGV[2]), ARGV[i]) end
"""
)

SPENDING = (
    _COMMON
    + """
expire()
local money = redis.call('HMGET', KEYS[1], 'spent', 'held')
return {money[1] or '0', money[2] or '0', redis.call('ZCARD', KEYS[2])}
"""
)
