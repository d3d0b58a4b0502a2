// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for the port: state, identifiers, counters, and management packets for the port that the driver passes on.

use super::{Handler, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, get, put_be, set};

/// Physical and logical states of a port.
const LINK_UP: u32 = 5;
const POLLING: u32 = 2;
const ACTIVE: u32 = 4;
const DOWN: u32 = 1;

/// Capability bits of the port. A driver can change `COMMUNICATION_MANAGEMENT` only.
const COMMUNICATION_MANAGEMENT: u32 = 1 << 16;
const SYSTEM_GUID: u32 = 1 << 11;
const CHANGEABLE: u32 = COMMUNICATION_MANAGEMENT;

/// Abilities of the port, as a driver sets them.
#[derive(Debug)]
pub struct Abilities(u32);

impl Default for Abilities {
    fn default() -> Self {
        Abilities(SYSTEM_GUID)
    }
}

/// Code of a timeout of about 1 s: 4.096 µs times 2 to the power of the code.
const SUBNET_TIMEOUT: u32 = 18;

/// LID of the subnet manager. Drivers require one, although the fabric has none.
const SUBNET_MANAGER: u32 = 1;

/// Full membership of the default partition.
const PKEY: u64 = 0xffff;

/// Number of P_Keys and of GIDs of a port.
pub(super) const PKEYS: usize = 128;
pub(super) const GIDS: usize = 8;

/// Index that selects all entries of a table.
const ALL: u32 = 0xffff;

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_MAD_IFC => Some(mad),
        MLX5_CMD_OP_QUERY_VPORT_STATE => Some(query_state),
        MLX5_CMD_OP_QUERY_HCA_VPORT_CONTEXT => Some(query_context),
        MLX5_CMD_OP_MODIFY_HCA_VPORT_CONTEXT => Some(modify_context),
        MLX5_CMD_OP_QUERY_HCA_VPORT_GID => Some(query_gid),
        MLX5_CMD_OP_QUERY_HCA_VPORT_PKEY => Some(query_pkey),
        MLX5_CMD_OP_QUERY_VPORT_COUNTER => Some(query_counter),
        _ => None,
    }
}

fn query_state(device: &mut Device, _: &[u8], output: &mut [u8]) -> Result<(), Status> {
    set!(output, query_vport_state_out, admin_state, 1u32);
    set!(
        output,
        query_vport_state_out,
        state,
        u32::from(device.port.up)
    );
    Ok(())
}

fn query_context(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    if get!(input, query_hca_vport_context_in, other_vport) != 0 {
        return Err(Status::BadParameter);
    }
    let context = &mut output[at!(query_hca_vport_context_out, hca_vport_context)..];
    let port = &device.port;
    let (state, physical) = if port.up {
        (ACTIVE, LINK_UP)
    } else {
        (DOWN, POLLING)
    };
    set!(context, hca_vport_context, has_smi, 1u32);
    set!(context, hca_vport_context, port_physical_state, physical);
    set!(context, hca_vport_context, port_state, state);
    set!(context, hca_vport_context, vport_state, state);
    set!(context, hca_vport_context, system_image_guid, port.guid);
    set!(context, hca_vport_context, port_guid, port.guid);
    set!(context, hca_vport_context, node_guid, port.guid);
    set!(
        context,
        hca_vport_context,
        cap_mask1,
        device.firmware.abilities.0
    );
    set!(
        context,
        hca_vport_context,
        cap_mask1_field_select,
        CHANGEABLE
    );
    set!(context, hca_vport_context, lid, port.lid);
    set!(context, hca_vport_context, subnet_timeout, SUBNET_TIMEOUT);
    set!(context, hca_vport_context, sm_lid, SUBNET_MANAGER);
    Ok(())
}

/// Changes capability bits of the port. Changes of identifiers are rejected: the fabric assigns them.
fn modify_context(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let context = input.get(at!(modify_hca_vport_context_in, hca_vport_context)..);
    let context = context.ok_or(Status::BadInputLength)?;
    let selected = get!(context, hca_vport_context, cap_mask1_field_select);
    if get!(context, hca_vport_context, field_select) != 0 || selected & !CHANGEABLE != 0 {
        return Err(Status::BadParameter);
    }
    let value = get!(context, hca_vport_context, cap_mask1);
    let abilities = &mut device.firmware.abilities.0;
    *abilities = *abilities & !selected | value & selected;
    Ok(())
}

fn query_gid(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let gid = device.port.gid();
    let room = &mut output[at!(query_hca_vport_gid_out, gid)..];
    let first = match get!(input, query_hca_vport_gid_in, gid_index) {
        ALL => 0,
        index if (index as usize) < GIDS => index,
        _ => return Err(Status::BadIndex),
    };
    if let Some(entry) = room.first_chunk_mut().filter(|_| first == 0) {
        *entry = gid;
    }
    set!(output, query_hca_vport_gid_out, gids_num, GIDS as u32);
    Ok(())
}

fn query_pkey(_: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let room = &mut output[at!(query_hca_vport_pkey_out, pkey)..];
    let first = match get!(input, query_hca_vport_pkey_in, pkey_index) {
        ALL => 0,
        index if (index as usize) < PKEYS => index,
        _ => return Err(Status::BadIndex),
    };
    if first == 0 {
        put_be(room, 2, 2, PKEY);
    }
    Ok(())
}

fn query_counter(device: &mut Device, _: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let count = &device.cost.count;
    let out = output;
    set!(
        out,
        query_vport_counter_out,
        received_ib_unicast.packets,
        count.packets_received
    );
    set!(
        out,
        query_vport_counter_out,
        received_ib_unicast.octets,
        count.bytes_received
    );
    set!(
        out,
        query_vport_counter_out,
        transmitted_ib_unicast.packets,
        count.packets_sent
    );
    set!(
        out,
        query_vport_counter_out,
        transmitted_ib_unicast.octets,
        count.bytes_sent
    );
    Ok(())
}

/// Attributes of a subnet management packet.
mod attribute {
    pub(super) const NODE_DESCRIPTION: u64 = 0x10;
    pub(super) const NODE_INFO: u64 = 0x11;
    pub(super) const PORT_INFO: u64 = 0x15;
    pub(super) const PKEY_TABLE: u64 = 0x16;
    pub(super) const GUID_INFO: u64 = 0x14;
}

const GET: u8 = 1;
const GET_RESPONSE: u8 = 0x81;
/// "Attribute not supported", and "directed route: coming back".
const UNSUPPORTED: u64 = 0xc;
const RETURNING: u64 = 0x8000;

/// Executes a subnet management packet for the port.
fn mad(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let request = input.get(at!(mad_ifc_in, mad)..).unwrap_or_default();
    let request: &[u8; 256] = request.first_chunk().ok_or(Status::BadInputLength)?;
    let [base, class, _, method, ..] = *request;
    let is_subnet = class == 0x01 || class == 0x81;
    if base != 1 || !is_subnet || method != GET {
        return Err(Status::BadPacket);
    }
    let room = output
        .get_mut(at!(mad_ifc_out, response_mad_packet)..)
        .unwrap_or_default();
    let response: &mut [u8; 256] = room.first_chunk_mut().ok_or(Status::BadOutputLength)?;
    *response = *request;
    response[3] = GET_RESPONSE;
    let known = attribute(
        device,
        crate::layout::be(request, 16, 2),
        &mut response[64..128],
    );
    let returning = if class == 0x81 { RETURNING } else { 0 };
    put_be(
        response,
        4,
        2,
        returning | if known { 0 } else { UNSUPPORTED },
    );
    Ok(())
}

/// Writes an attribute to its 64 bytes in the packet. Returns `false` if the attribute is not supported.
fn attribute(device: &Device, id: u64, data: &mut [u8]) -> bool {
    let port = &device.port;
    data.fill(0);
    match id {
        attribute::NODE_DESCRIPTION => data.copy_from_slice(&device.firmware.description.0),
        attribute::NODE_INFO => {
            data[..4].copy_from_slice(&[1, 1, 1, 1]);
            for guid in [4, 12, 20] {
                put_be(data, guid, 8, port.guid);
            }
            put_be(data, 28, 2, PKEYS as u64);
            put_be(data, 30, 2, 0x1019);
            put_be(data, 36, 4, 0x0100_02c9);
        }
        attribute::PORT_INFO => {
            put_be(data, 16, 2, u64::from(port.lid));
            put_be(data, 18, 2, u64::from(SUBNET_MANAGER));
            put_be(data, 20, 4, u64::from(device.firmware.abilities.0));
            let (state, physical) = if port.up {
                (ACTIVE, LINK_UP)
            } else {
                (DOWN, POLLING)
            };
            data[32] = state as u8;
            data[33] = (physical as u8) << 4;
        }
        attribute::PKEY_TABLE => put_be(data, 0, 2, PKEY),
        attribute::GUID_INFO => put_be(data, 0, 8, port.guid),
        _ => return false,
    }
    true
}
