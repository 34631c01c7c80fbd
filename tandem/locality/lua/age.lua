-- Move those blocks of a part of a chain to the recent generation that are in the old one; `leading` leaves this to do.
-- ARGV: packed keys, half of the bound, 1 = even if the old generation is then dropped, else 0
-- Returns whether it was done.
local MOST_READ = 512
local packed, half, may_forget = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
local state, total = open(), #packed / KEY_BYTES
if not state then return 1 end
local collect, old_fields, old_holders = new_collector()
for position = 0, total - 1, MOST_READ do
  local fields = unpack_fields(packed, KEY_BYTES, position, math.min(MOST_READ, total - position))
  local values, is_old = read(state, fields)
  collect(fields, values, is_old, #fields)
end
if not may_forget and not has_room(state, half, old_holders) then return 0 end
make_young(state, half, old_fields, old_holders)
return 1
