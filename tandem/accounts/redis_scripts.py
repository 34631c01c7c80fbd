"""Lua scripts for accounts in Redis, each atomic. They follow the same rules as `balance.Balance`.

Levels are in 1/60000 of a token and money in nanos, whole numbers below 2**53, which Lua's doubles hold exactly;
spending is summed by HINCRBY, in 64-bit integers. Every script gets the time in milliseconds, or '' to use Redis' own.

Redis keys of each account key: state (spent, held, levels), open (charges by the end of their lease), held (amounts
reserved by each charge, and as `CHARGE+` its checkpoint). Shared keys: leases (account keys by the last end of a
lease), settled:CHARGE ('1', or the bill of a checkpoint that was billed), ledger, totals:DAY, days. Their names follow
from that of `state`, and their common braces keep them in one slot.

A bill is a JSON object of strings: cost, entry, day, who (account key, tenant and model, as in totals), the five token
counts, and the limits max_entries, totals_s and remembered_ms.
"""

_NOW = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

# KEYS: state, open, held. ARGV[1]: now, or ''.
_COMMON = (
    _NOW
    + """
local PARTS = 60000
local COUNTS = {'num_input', 'num_written_5m', 'num_written_1h', 'num_read', 'num_output'}
local base, account = string.match(KEYS[1], '^(.*):state:(.*)$')
local function whole(value) return string.format('%.0f', value) end
local function count(bill, sign)
  local function signed(value) return (sign > 0 or value == '0') and value or '-' .. value end
  local totals = base .. ':totals:' .. bill.day
  redis.call('HINCRBY', KEYS[1], 'spent', signed(bill.cost))
  redis.call('HINCRBY', totals, bill.who .. 'num_requests', sign)
  redis.call('HINCRBY', totals, bill.who .. 'cost_nanos', signed(bill.cost))
  for _, name in ipairs(COUNTS) do redis.call('HINCRBY', totals, bill.who .. name, signed(bill[name])) end
  redis.call('EXPIRE', totals, bill.totals_s)
  redis.call('ZADD', base .. ':days', 0, bill.day)
end
local function enter(bill)
  count(bill, 1)
  return redis.call('XADD', base .. ':ledger', 'MAXLEN', '~', bill.max_entries, '*', 'entry', bill.entry)
end
local function mark(charge, bill, value)
  redis.call('SET', base .. ':settled:' .. charge, value, 'PX', bill.remembered_ms)
end
local function unbill(charge)
  local marker = redis.call('GET', base .. ':settled:' .. charge)
  if marker == '1' then return false end
  if marker then
    local bill = cjson.decode(marker)
    redis.call('XDEL', base .. ':ledger', bill.number)
    count(bill, -1)
    redis.call('DEL', base .. ':settled:' .. charge)
  end
  return true
end
local function hold(charge, cost, amounts)
  redis.call('HINCRBY', KEYS[1], 'held', cost)
  redis.call('HSET', KEYS[3], charge, table.concat({cost, amounts[1], amounts[2], amounts[3]}, ' '))
end
local function keep_until(charge, ends)
  redis.call('ZADD', KEYS[2], whole(ends), charge)
  redis.call('ZADD', base .. ':leases', 'GT', whole(ends), account)
end
local function let_go(charge)
  local held = redis.call('HGET', KEYS[3], charge)
  if not held then return nil end
  local cost, a, b, c = string.match(held, '^(%d+) (%d+) (%d+) (%d+)$')
  redis.call('HINCRBY', KEYS[1], 'held', whole(0 - tonumber(cost)))
  redis.call('ZREM', KEYS[2], charge)
  redis.call('HDEL', KEYS[3], charge, charge .. '+')
  return {tonumber(a), tonumber(b), tonumber(c)}
end
local function expire()
  for _, charge in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
    local checkpoint = redis.call('HGET', KEYS[3], charge .. '+')
    let_go(charge)
    if checkpoint then
      local bill = cjson.decode(checkpoint)
      bill.number = enter(bill)
      mark(charge, bill, cjson.encode(bill))
    end
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
)

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
  hold(charge, ARGV[5], {ARGV[8], ARGV[9], ARGV[10]})
  keep_until(charge, now + ARGV[4])
end
keep(levels, at)
return {why, tostring(wait), whole(left), whole(levels[1]), whole(levels[2]), whole(levels[3])}
"""
)

# ARGV: now, charge, bill, whether granted, three reserved, three used, three rates.
SETTLE = (
    _COMMON
    + """
local charge, bill = ARGV[2], cjson.decode(ARGV[3])
if not unbill(charge) then return 0 end
mark(charge, bill, '1')
local reserved = let_go(charge)
if not reserved then
  reserved = ARGV[4] == '1' and {tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])} or {0, 0, 0}
end
expire()
local levels, at = levels_of({ARGV[11], ARGV[12], ARGV[13]})
for i = 1, 3 do
  local rate = tonumber(ARGV[10 + i])
  if rate then
    levels[i] = math.max(0, math.min(rate * PARTS, levels[i] + (reserved[i] - tonumber(ARGV[7 + i])) * PARTS))
  end
end
keep(levels, at)
enter(bill)
return 1
"""
)

# ARGV: now, lease, then of each charge: its id, cost, three amounts, whether granted, bill of its checkpoint or ''.
RENEW = (
    _COMMON
    + """
for i = 3, #ARGV, 7 do
  local charge = ARGV[i]
  local is_held = redis.call('HEXISTS', KEYS[3], charge) == 1
  if not is_held and ARGV[i + 5] == '1' and unbill(charge) then
    hold(charge, ARGV[i + 1], {ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]})
    is_held = true
  end
  if is_held then
    keep_until(charge, now + ARGV[2])
    if ARGV[i + 6] ~= '' then redis.call('HSET', KEYS[3], charge .. '+', ARGV[i + 6]) end
  end
end
expire()
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

# Bill what has expired of an account key, and forget its lease once nothing of it is open.
EXPIRE = (
    _COMMON
    + """
expire()
if redis.call('ZCARD', KEYS[2]) == 0 then redis.call('ZREM', base .. ':leases', account) end
"""
)

# KEYS: leases. ARGV: now, or ''; how many at most. The account keys of which nothing has been renewed in time.
OVERDUE = (
    _NOW
    + """
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
"""
)
