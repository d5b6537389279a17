-- Leases on meters that several gateways share: one hash each, with what all used (`used`, draining at `rate` since
-- `seen`), when somebody last went short (`short`), which hash this is (`born`), and a field for each gateway:
-- "taken hold reserved till". Everything a gateway says is absolute, so saying it twice changes nothing.
-- ARGV: gateway, lease in s, time until a gateway is forgotten in s, then FIELDS values for each key.
local FIELDS = 15
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local me, lease, forget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local answer = {}

local function exact(number)
  return string.format('%.17g', number)
end

for index, key in ipairs(KEYS) do
  local at = 3 + (index - 1) * FIELDS
  local known, again = ARGV[at + 1], ARGV[at + 15] == '1'
  local amount, rate, stored, counted = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  local taken, unsaid, uncounted = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7]), tonumber(ARGV[at + 8])
  local keep, reserved, ask, least, want = tonumber(ARGV[at + 9]), tonumber(ARGV[at + 10]), tonumber(ARGV[at + 11]), tonumber(ARGV[at + 12]), tonumber(ARGV[at + 13])
  local keep_for_s = tonumber(ARGV[at + 14])

  local used, seen, short, born, said = nil, now, 0, nil, nil
  local others, busy, gateways = 0, 0, 1
  local row = redis.call('HGETALL', key)
  for place = 1, #row, 2 do
    local name, value = row[place], row[place + 1]
    if name == 'used' then used = tonumber(value)
    elseif name == 'seen' then seen = tonumber(value)
    elseif name == 'short' then short = math.min(tonumber(value), now)
    elseif name == 'born' then born = value
    else
      local its_taken, its_hold, its_reserved, till = string.match(value, '(%S+) (%S+) (%S+) (%S+)')
      till = tonumber(till)
      if till > now + lease then  -- the clock was set back, and a gateway that is gone will not say so again
        till = now + lease
        redis.call('HSET', key, name, table.concat({its_taken, its_hold, its_reserved, exact(till)}, ' '))
      end
      if name == me then
        said = tonumber(its_taken)
      elseif till > now then
        others = others + tonumber(its_hold)
        busy = busy + tonumber(its_reserved)
        gateways = gateways + 1
      elseif till + forget < now then
        redis.call('HDEL', key, name)
      end
    end
  end

  if not born then
    born = exact(now) .. me
    used = stored + uncounted
  else
    used = math.max(used - rate * math.max(now - seen, 0), 0)
    if said and not again then used = used + taken - said
    -- What this gateway used unheard, the store may have counted and another gateway told of.
    else used = math.max(used, stored) + (born == known and unsaid or uncounted) end
  end
  used = math.max(used, counted, 0)

  local free = math.floor(amount - used - others - keep + 1e-6)
  local grant, wanted = 0, now - short < 1
  if ask > 0 then
    if free >= ask then grant = ask elseif free >= least then grant = free end
    if grant < ask then short = now end
  end
  if want > 0 and grant >= ask and not wanted then
    grant = grant + math.max(math.min(want, math.floor((free - grant) / (2 * gateways))), 0)
  end

  local mine = table.concat({exact(taken), exact(keep + grant), exact(reserved + math.min(grant, ask)), exact(now + lease)}, ' ')
  redis.call('HSET', key, 'used', exact(used), 'seen', exact(now), 'short', exact(short), 'born', born, me, mine)
  redis.call('EXPIRE', key, keep_for_s)
  answer[index] = {exact(keep + grant), exact(used), exact(busy), exact(others), wanted and 1 or 0, born}
end
return answer
