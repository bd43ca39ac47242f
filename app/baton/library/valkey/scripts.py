"""The scripts that the shared store runs, each as one step that nothing comes between.

All of their keys begin with `BASE`, whose braces keep them in one slot of a cluster:

    size     hash    file -> bytes                     refs    hash    file -> entries that need it
    prefs    hash    file -> pinned entries            pins    hash    entry -> 1
    entry    hash    entry -> its files, in order      due     zset    entry -> end of its life, ms
    use:S    zset    entry of scope S -> last use, us; those that are pinned or not evictable are left out
    held     hash    scope -> bytes of its files and records           pinned  hash  scope -> pinned bytes
    r:ID     hash    a record: body, changes, rev, seal
    rec      hash    record -> scope and bytes
    ends     zset    record -> end of its life, ms     records string  bytes of all records
    seq      string  number of the last change         log     zset    record -> number of its last change
    gone     zset    removed record -> number of that change, the last 10,000
    floor    string  number of the last removal that `gone` has lost
    dead     zset    record that was removed, not just expired -> number of that change, the last 10,000
    lost     string  number of the last such change that `dead` has lost

Whoever can write to the store may have put anything there. A value that no script wrote counts as none, and
`call` removes it where a command fails over it; so one bad value does not end the scripts of all tenants.

A file's bytes are elsewhere, in a slot of their own: the script counts a file before it is written, and who
frees one removes its bytes afterwards.
"""

from __future__ import annotations

BEFORE_OTHERS_US = 4_000_000_000_000_000
"""Automatic entries were used so much longer ago than others, for the choice of what is evicted."""

COMMON = """
local base = KEYS[1] .. ':'
local freed = {1}
local function call(command, key, field, ...)
  if not key then return redis.call(command) end
  local answer = field and redis.pcall(command, key, field, ...) or redis.pcall(command, key)
  if type(answer) ~= 'table' or not answer.err then return answer end
  local no_number = string.find(answer.err, 'not an integer') or string.find(answer.err, 'overflow')
  if no_number and command == 'HINCRBY' then
    redis.call('HDEL', key, field)
  elseif no_number or string.find(answer.err, 'WRONGTYPE') then
    redis.call('DEL', key)
  end
  if field then return redis.call(command, key, field, ...) end
  return redis.call(command, key)
end
local function number(value)
  local found = tonumber(value or '0') or 0
  return math.abs(found) < 2 ^ 53 and found or 0
end
local function scope_of(entry) return string.match(entry, '^[^/]+') or '' end
local clock = call('TIME')
local now_us = number(clock[1]) * 1000000 + number(clock[2])
local now_ms = math.floor(now_us / 1000)

local function add(name, field, count)
  if call('HINCRBY', base .. name, field, string.format('%d', count)) <= 0 then
    call('HDEL', base .. name, field)
  end
end

local function sum(name)
  local total = 0
  for _, each in ipairs(call('HVALS', base .. name)) do total = total + number(each) end
  return total
end

local function unpin(entry, scope, files)
  if call('HDEL', base .. 'pins', entry) == 0 then return end
  for file in string.gmatch(files, '%S+') do
    if call('HINCRBY', base .. 'prefs', file, -1) <= 0 then
      call('HDEL', base .. 'prefs', file)
      add('pinned', scope, -number(call('HGET', base .. 'size', file)))
    end
  end
end

local function release(scope, file)
  if call('HINCRBY', base .. 'refs', file, -1) <= 0 then
    add('held', scope, -number(call('HGET', base .. 'size', file)))
    call('HDEL', base .. 'refs', file)
    call('HDEL', base .. 'size', file)
    freed[#freed + 1] = file
  end
end

local function drop(entry)
  local files, scope = call('HGET', base .. 'entry', entry), scope_of(entry)
  call('ZREM', base .. 'due', entry)
  call('ZREM', base .. 'use:' .. scope, entry)
  if not files then return end
  unpin(entry, scope, files)
  call('HDEL', base .. 'entry', entry)
  for file in string.gmatch(files, '%S+') do release(scope, file) end
end

local function next_change()
  return call('INCR', base .. 'seq')
end

local function remember(name, lost, id, change)
  call('ZADD', base .. name, change, id)
  local extra = call('ZCARD', base .. name) - 10000
  if extra > 0 then
    local cut = call('ZRANGE', base .. name, extra - 1, extra - 1, 'WITHSCORES')
    call('SET', base .. lost, cut[2])
    call('ZREMRANGEBYRANK', base .. name, 0, extra - 1)
  end
end

-- Whether a record that is missing was removed by somebody, after a change or at any time that is remembered.
local function was_removed(id, change)
  return call('ZSCORE', base .. 'dead', id) or number(call('GET', base .. 'lost')) > number(change)
end

-- Begins with a write that needs no memory: after one a full server refuses none of a script's others.
local function forget(id)
  local line = call('HGET', base .. 'rec', id)
  call('HDEL', base .. 'rec', id)
  local scope, bytes = string.match(line or '', '^(%S+) (%d+)$')
  if scope then
    add('held', scope, -number(bytes))
    call('DECRBY', base .. 'records', string.format('%d', number(bytes)))
  end
  call('ZREM', base .. 'ends', id)
  call('ZREM', base .. 'log', id)
  call('DEL', base .. 'r:' .. id)
  remember('gone', 'floor', id, next_change())
end

local function is_pending(id)
  local changes = call('HGET', base .. 'r:' .. id, 'changes')
  local readable, told = pcall(cjson.decode, changes or '')
  return readable and type(told) == 'table' and told.state == 'pending'
end

local function purge()
  for _, each in ipairs(call('ZRANGE', base .. 'due', '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, 64)) do
    drop(each)
  end
  for _, each in ipairs(call('ZRANGE', base .. 'ends', '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, 64)) do
    forget(each)
  end
end

-- Automatic entries go before others of their scope: see 'use' in RESERVE.
local function victim(share)
  local held, best, most, oldest, from = call('HGETALL', base .. 'held'), nil, share, math.huge, nil
  for at = 1, #held, 2 do
    local bytes = number(held[at + 1])
    local first = call('ZRANGE', base .. 'use:' .. held[at], 0, 0, 'WITHSCORES')
    if first[1] and bytes > most then
      best, most, from = first[1], bytes, held[at]
    elseif first[1] and most == share and number(first[2]) < oldest then
      best, oldest, from = first[1], number(first[2]), held[at]
    end
  end
  if best then call('ZREM', base .. 'use:' .. from, best) end  -- also what is no entry, or of another scope
  return best
end

local function make_room(scope, want, budget)
  if want + sum('pinned') + number(call('GET', base .. 'records')) > budget then return false end
  local tenants = call('HLEN', base .. 'held')
  if call('HEXISTS', base .. 'held', scope) == 0 then tenants = tenants + 1 end
  while sum('held') + want > budget do
    local entry = victim(budget / tenants)
    if not entry then return false end
    drop(entry)
  end
  return true
end
"""

CHECK = (
    COMMON
    + """
-- ARGV: the proof that this gateway has the pool's secret. Returns the pool's proof, the version, s and us.
if call('EXISTS', base .. 'proof') == 0 then call('SET', base .. 'proof', ARGV[1]) end
return {call('GET', base .. 'proof'), redis.REDIS_VERSION or '6', clock[1], clock[2]}
"""
)

BEGIN_FILE = """
-- KEYS: what a file is written to. ARGV: its bytes, those of a chunk, lifetime ms. It always has an end.
redis.call('HSET', KEYS[1], 'n', ARGV[1], 'c', ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""

PLACE_FILE = """
-- KEYS: what a file was written to, and its place. ARGV: fields of a whole file, lifetime ms.
-- Returns 1: it is there, also if another gateway was first, 0: a part of it has expired.
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then
  redis.call('UNLINK', KEYS[1])
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if redis.call('RENAMENX', KEYS[1], KEYS[2]) == 0 then
  redis.call('UNLINK', KEYS[1])
  redis.call('PEXPIRE', KEYS[2], ARGV[2], 'GT')
end
return 1
"""

RESERVE = (
    COMMON
    + f"local before_others_us = {BEFORE_OTHERS_US}"
    + """
-- ARGV: entry, evictable (1 or 0), automatic (1 or 0), budget, lifetime ms, then file and bytes, in order.
-- Takes room for an entry. Returns {1, files that were freed...}, or {0}: it does not fit.
purge()
local entry, budget, due = ARGV[1], number(ARGV[4]), now_ms + number(ARGV[5])
local scope, names, want = scope_of(entry), {}, 0
for at = 6, #ARGV, 2 do names[#names + 1] = ARGV[at] end
local files = table.concat(names, ' ')
if call('HGET', base .. 'entry', entry) == files then
  call('ZADD', base .. 'due', due, entry)
  return freed
end
drop(entry)
for at = 6, #ARGV, 2 do
  if call('HINCRBY', base .. 'refs', ARGV[at], 1) == 1 then want = want + number(ARGV[at + 1]) end
end
local fits = make_room(scope, want, budget)
for at = 6, #ARGV, 2 do
  if not fits then
    release(scope, ARGV[at])
  elseif call('HSETNX', base .. 'size', ARGV[at], ARGV[at + 1]) == 1 then
    add('held', scope, number(ARGV[at + 1]))
  end
end
if not fits then
  freed[1] = 0
  return freed
end
call('HSET', base .. 'entry', entry, files)
call('ZADD', base .. 'due', due, entry)
if ARGV[2] == '1' then
  call('ZADD', base .. 'use:' .. scope, now_us - number(ARGV[3]) * before_others_us, entry)
end
return freed
"""
)

DROP = (
    COMMON
    + """
-- ARGV: entries. Returns {1, files that were freed...}.
for _, each in ipairs(ARGV) do drop(each) end
return freed
"""
)

PIN = (
    COMMON
    + """
-- ARGV: entry, pinned (1 or 0), most bytes of all pins. Returns 1: done, 0: too much is pinned, -1: no entry.
local entry, scope = ARGV[1], scope_of(ARGV[1])
local files = call('HGET', base .. 'entry', entry)
if not files then return -1 end
if ARGV[2] == '0' then
  local was = call('HEXISTS', base .. 'pins', entry)
  unpin(entry, scope, files)
  if was == 1 then call('ZADD', base .. 'use:' .. scope, now_us, entry) end
  return 1
end
if call('HEXISTS', base .. 'pins', entry) == 1 then return 1 end
local more = 0
for file in string.gmatch(files, '%S+') do
  if call('HEXISTS', base .. 'prefs', file) == 0 then
    more = more + number(call('HGET', base .. 'size', file))
  end
end
local mine = number(call('HGET', base .. 'pinned', scope))
local tenants = call('HLEN', base .. 'pinned') + (mine == 0 and 1 or 0)
if sum('pinned') + more > number(ARGV[3]) or mine + more > number(ARGV[3]) / tenants then return 0 end
call('HSET', base .. 'pins', entry, 1)
call('ZREM', base .. 'use:' .. scope, entry)
for file in string.gmatch(files, '%S+') do call('HINCRBY', base .. 'prefs', file, 1) end
if more > 0 then add('pinned', scope, more) end
return 1
"""
)

READ_RECORDS = (
    COMMON
    + """
-- ARGV: most bytes of a record, then id and known revision. Returns for each body, changes, revision and
-- seal; 1: it has the known revision, 0: it has more bytes, nil: there is none.
local found = {}
for at = 2, #ARGV, 2 do
  local key, row = base .. 'r:' .. ARGV[at], {}
  local bytes = 0
  for _, each in ipairs({'body', 'changes', 'rev', 'seal'}) do bytes = bytes + call('HSTRLEN', key, each) end
  if bytes > number(ARGV[1]) then
    found[#found + 1] = 0
  elseif bytes == 0 then
    found[#found + 1] = false
  elseif call('HGET', key, 'rev') == ARGV[at + 1] then
    found[#found + 1] = 1
  else
    found[#found + 1] = call('HMGET', key, 'body', 'changes', 'rev', 'seal')
  end
end
return found
"""
)

NEWS = (
    COMMON
    + """
-- ARGV: number of a change. Returns the id of the store, the numbers of the last change and of the last
-- removal that is not remembered, the records that were changed after that change, and those removed.
return {
  call('GET', base .. 'id'), number(call('GET', base .. 'seq')), number(call('GET', base .. 'floor')),
  call('ZRANGE', base .. 'log', '(' .. ARGV[1], '+inf', 'BYSCORE'),
  call('ZRANGE', base .. 'gone', '(' .. ARGV[1], '+inf', 'BYSCORE'),
}
"""
)

WAS_REMOVED = (
    COMMON
    + """
-- ARGV: id, change at which the gateway reported last that it is pending. Returns 1 or 0.
return was_removed(ARGV[1], ARGV[2]) and 1 or 0
"""
)

USE_ENTRY = (
    COMMON
    + f"local before_others_us = {BEFORE_OTHERS_US}"
    + """
-- ARGV: entry, most bytes of its files' names, automatic (1 or 0). Marks an entry as used now, also of a full
-- server if that lets it. Returns the names of its files, nil: there is none, or they are longer.
local use = base .. 'use:' .. scope_of(ARGV[1])
redis.pcall('ZADD', use, 'XX', 'GT', now_us - number(ARGV[3]) * before_others_us, ARGV[1])
if call('HSTRLEN', base .. 'entry', ARGV[1]) > number(ARGV[2]) then return false end
return call('HGET', base .. 'entry', ARGV[1])
"""
)

ENTRY_BYTES = (
    COMMON
    + """
-- ARGV: most bytes of an entry's names, entries. Returns the bytes of each entry's files; 0: there is none.
local found = {}
for at = 2, #ARGV do
  local long = call('HSTRLEN', base .. 'entry', ARGV[at]) > number(ARGV[1])
  local files, total = not long and call('HGET', base .. 'entry', ARGV[at]) or '', 0
  for file in string.gmatch(files, '%S+') do
    total = total + math.max(0, number(call('HGET', base .. 'size', file)))
  end
  found[#found + 1] = total
end
return found
"""
)

FILE_HEAD = """
-- KEYS: a file. ARGV: most bytes that it may have, most bytes of a chunk that is sent along.
-- Returns its bytes and a chunk's, as it says; the longest chunk's; and its first chunk, or nil. Or nothing:
-- there is no file. What is longer than it says is not read.
local function told(field)
  local size = redis.pcall('HSTRLEN', KEYS[1], field)
  local text = type(size) == 'number' and size <= 18 and redis.call('HGET', KEYS[1], field) or ''
  return tonumber(string.match(text, '^%d+$') or '0')
end
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local bytes, chunk, longest, first = told('n'), told('c'), 0, false
if bytes > 0 and bytes <= tonumber(ARGV[1]) and chunk >= tonumber(ARGV[2]) then
  for at = 0, math.ceil(bytes / chunk) - 1 do
    longest = math.max(longest, redis.call('HSTRLEN', KEYS[1], at))
  end
  if longest <= chunk and redis.call('HSTRLEN', KEYS[1], 0) <= tonumber(ARGV[2]) then
    first = redis.call('HGET', KEYS[1], 0)
  end
end
return {bytes, chunk, longest, first}
"""

WRITE_RECORD = (
    COMMON
    + """
-- ARGV: id, scope, body, changes, revision, lifetime ms, budget, revision of the pending record or '',
-- change at which the gateway reported last that it is pending, seal.
-- Returns {1, files that were freed...}, {0}: no room, {2}: the pending one has changed, {-1}: was deleted.
purge()
local id, scope = ARGV[1], ARGV[2]
local key = base .. 'r:' .. id
if ARGV[8] ~= '' then
  local revision = call('HGET', key, 'rev')
  if not revision and was_removed(id, ARGV[9]) then return {-1} end
  if revision and revision ~= ARGV[8] then return {2} end
end
local line, bytes = call('HGET', base .. 'rec', id), #ARGV[3] + #ARGV[4]
local more = bytes - (line and number(string.match(line, ' (%d+)$')) or 0)
if more > 0 and not make_room(scope, more, number(ARGV[7])) then
  freed[1] = 0
  return freed
end
call('HSET', key, 'body', ARGV[3], 'changes', ARGV[4], 'rev', ARGV[5], 'seal', ARGV[10])
call('PEXPIRE', key, ARGV[6])
call('HSET', base .. 'rec', id, scope .. ' ' .. string.format('%d', bytes))
call('ZADD', base .. 'ends', now_ms + number(ARGV[6]), id)
call('ZADD', base .. 'log', next_change(), id)
add('held', scope, more)
call('INCRBY', base .. 'records', string.format('%d', more))
return freed
"""
)

CHANGE_RECORD = (
    COMMON
    + """
-- ARGV: id, expected revision, changes, new revision, lifetime ms, seal, further entries that live as long.
-- Returns {1, files of these entries...}, {0}: another revision, {-1}: it was deleted.
local key = base .. 'r:' .. ARGV[1]
local revision = call('HGET', key, 'rev')
if not revision then return {-1} end
if revision ~= ARGV[2] then return {0} end
call('HSET', key, 'changes', ARGV[3], 'rev', ARGV[4], 'seal', ARGV[6])
call('PEXPIRE', key, ARGV[5])
call('ZADD', base .. 'ends', now_ms + number(ARGV[5]), ARGV[1])
call('ZADD', base .. 'log', next_change(), ARGV[1])
local kept = {1}
for at = 7, #ARGV do
  local files = call('HGET', base .. 'entry', ARGV[at])
  if files then
    call('ZADD', base .. 'due', now_ms + number(ARGV[5]), ARGV[at])
    for file in string.gmatch(files, '%S+') do kept[#kept + 1] = file end
  end
end
return kept
"""
)

REMOVE_RECORD = (
    COMMON
    + """
-- ARGV: id, expected revision or '', entries that go with it.
-- Returns {1, files that were freed...}, or {0}: it has another revision.
if ARGV[2] ~= '' then
  local revision = call('HGET', base .. 'r:' .. ARGV[1], 'rev')
  if revision and revision ~= ARGV[2] then return {0} end
end
forget(ARGV[1])
remember('dead', 'lost', ARGV[1], call('GET', base .. 'seq'))
for at = 3, #ARGV do drop(ARGV[at]) end
return freed
"""
)

KEEP_PENDING = (
    COMMON
    + """
-- ARGV: lifetime ms, change at the gateway's last report, ids. Lets pending records live on; those that have
-- been saved meanwhile keep the lives they have. Returns the last change, then the ids of the deleted ones.
local told = {number(call('GET', base .. 'seq'))}
for at = 3, #ARGV do
  local id = ARGV[at]
  if is_pending(id) then
    call('PEXPIRE', base .. 'r:' .. id, ARGV[1])
    call('ZADD', base .. 'ends', now_ms + number(ARGV[1]), id)
  elseif call('EXISTS', base .. 'r:' .. id) == 0 and was_removed(id, ARGV[2]) then
    told[#told + 1] = id
  end
end
return told
"""
)
