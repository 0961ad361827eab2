"""A Wireshark dissector for MRC in Lua, made from the tables of net.mrc.wire.

Use: ``emu fabric dissector > ~/.local/lib/wireshark/plugins/mrc.lua``; or ``lua()``. UDP port 4791 is no longer RoCE.
Fields that a single reader of the specification vouches for carry "[one witness: ...]" in their description, as
net.mrc.wire marks them; nothing here is called compliant.
Limits: what is behind the headers is shown as data; the ICRC is shown, not checked; a cut packet ends where it was.
Source: net.mrc.wire; the Lua interface of Wireshark 3.0 and later (Proto, ProtoField, TvbRange:bitfield).
"""

from __future__ import annotations

from typing import Any

from net.mrc import wire
from net.mrc.frame import ICRC_BYTES

_ENUMS: dict[tuple[str, str], Any] = {
    ("bth", "opcode"): wire.Opcode,
    ("seth", "m"): wire.EcnMark,
    ("neth", "nack_reason"): wire.NackReason,
    ("erth", "op"): wire.EndpointOp,
    ("eeth", "op"): wire.EndpointOp,
}
_HEADERS = [kind for kind in wire.HEADERS if kind not in (wire.Ipv6, wire.Udp)]

_TAIL = """
local function show(tree, name, buffer, offset)
  local header = headers[name]
  local size = math.min(header.size, buffer:len() - offset)
  local branch = tree:add(mrc, buffer(offset, size), header.title)
  for _, field in ipairs(header.fields) do
    local first = math.floor(field.bit / 8)
    local last = math.floor((field.bit + field.bits - 1) / 8)
    if offset + last >= buffer:len() then
      branch:add(buffer(offset, size), "cut here")
      return nil
    end
    local range = buffer(offset + first, last - first + 1)
    if field.bits == 64 then
      branch:add(field.proto, range, range:uint64())
    else
      local value = range:bitfield(field.bit - 8 * first, field.bits)
      if field.signed and value >= 2 ^ (field.bits - 1) then value = value - 2 ^ field.bits end
      branch:add(field.proto, range, value)
    end
  end
  return offset + header.size
end

function mrc.dissector(buffer, packet, tree)
  if buffer:len() < headers.bth.size then return 0 end
  local stack = stacks[buffer(0, 1):uint()]
  if stack == nil then return 0 end
  packet.cols.protocol = "MRC"
  packet.cols.info = stack.name .. " QP " .. buffer(5, 3):uint() .. " PSN " .. buffer(9, 3):uint()
  local root = tree:add(mrc, buffer(), "MRC " .. stack.name .. " (reconstructed)")
  local offset = show(root, "bth", buffer, 0)
  local stamped = buffer(8, 1):bitfield(3, 1) == 1
  for _, name in ipairs(stack) do
    if offset == nil then return buffer:len() end
    offset = show(root, name, buffer, offset)
    if offset ~= nil and name == "meth" and stamped then offset = show(root, "tseth", buffer, offset) end
  end
  if offset == nil then return buffer:len() end
  local left = buffer:len() - offset
  if left > ICRC then root:add(buffer(offset, left - ICRC), "data, " .. (left - ICRC) .. " bytes") end
  if left >= ICRC then root:add(buffer(buffer:len() - ICRC, ICRC), "ICRC") end
  return buffer:len()
end

DissectorTable.get("udp.port"):add(PORT, mrc)
"""


def lua(port: int = wire.UDP_PORT) -> str:
    """The program; ``port``: the UDP port that a deployment uses."""
    lines = [
        "-- MRC dissector, made by `emu fabric dissector` from the tables of net.mrc.wire.",
        "-- Reconstructed from public readers of OCP-MRC-1.0; fields with one witness say so. Not called compliant.",
        'local mrc = Proto("mrc", "Multipath Reliable Connection (reconstructed)")',
        f"local PORT, ICRC = {port}, {ICRC_BYTES}",
        "local headers = {}",
        "local all = {}",
        "local function add(header, proto, bit, bits, signed)",
        "  all[#all + 1] = proto",
        "  local fields = headers[header].fields",
        "  fields[#fields + 1] = { proto = proto, bit = bit, bits = bits, signed = signed }",
        "end",
    ]
    for kind in _HEADERS:
        name = kind.__name__.lower()
        title = (kind.__doc__ or name).splitlines()[0].rstrip(".")
        size = wire.CODECS[kind].size
        lines.append(
            f"headers.{name} = {{ title = {_quoted(name.upper() + ': ' + title)}, size = {size}, fields = {{}} }}"
        )
        bit = 0
        for spec in wire.fields(kind):
            bits, signed = spec.bits.size, str(spec.bits.signed).lower()
            lines.append(f"add({_quoted(name)}, {_field(name, spec)}, {bit}, {bits}, {signed})")
            bit += bits
    lines += ["mrc.fields = all", "local stacks = {"]
    for opcode, kinds in wire.STACKS.items():
        names = ", ".join(_quoted(kind.__name__.lower()) for kind in kinds)
        lines.append(f"  [{int(opcode)}] = {{ name = {_quoted(wire.Opcode(opcode).name)}, {names} }},")
    return "\n".join([*lines, "}"]) + "\n" + _TAIL.lstrip("\n")


def _field(header: str, spec: wire.FieldSpec) -> str:
    size = spec.bits.size
    width = next(width for width in (8, 16, 24, 32, 64) if size <= width)
    kind = f"{'int' if spec.bits.signed else 'uint'}{width}"
    names = _ENUMS.get((header, spec.name))
    base = "base.DEC" if spec.bits.signed else "base.HEX_DEC" if names is None else "base.HEX"
    values = "nil"
    if names is not None:
        values = "{ " + ", ".join(f"[{int(one)}] = {_quoted(one.name)}" for one in names) + " }"
    text = f"[one witness: {spec.bits.witness}]" if spec.bits.witness else ""
    name = f"{_quoted(f'mrc.{header}.{spec.name}')}, {_quoted(spec.name)}"
    return f"ProtoField.{kind}({name}, {base}, {values}, nil, {_quoted(text)})"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
