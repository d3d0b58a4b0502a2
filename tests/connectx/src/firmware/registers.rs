// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Registers of the port and the adapter, which drivers read and write with ACCESS_REG.

use super::{Handler, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, get, set};

const PMTU: u32 = 0x5003;
const PTYS: u32 = 0x5004;
const PPCNT: u32 = 0x5008;
const PVLC: u32 = 0x500f;
const NODE_DESCRIPTION: u32 = 0x6001;
const HOST_ENDIANNESS: u32 = 0x7004;

/// Link width of four lanes, and speed EDR.
const WIDTH_4X: u32 = 1 << 2;
const EDR: u32 = 1 << 5;

/// Maximum payload of a packet in bytes.
const MTU: u32 = 4096;

/// VL 0 to 3.
const FOUR_LANES: u32 = 4;

/// Counter group of InfiniBand in PPCNT.
const INFINIBAND_COUNTERS: u32 = 0x20;

/// Node description, as set by the driver.
#[derive(Clone, Debug)]
pub struct Description(pub [u8; 64]);

impl Default for Description {
    fn default() -> Self {
        let mut text = [0; 64];
        text[..8].copy_from_slice(b"connectx");
        Description(text)
    }
}

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    (u32::from(opcode) == MLX5_CMD_OP_ACCESS_REG).then_some(access)
}

fn access(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let given = input
        .get(at!(access_register_in, register_data)..)
        .unwrap_or_default();
    let requested = output
        .get_mut(at!(access_register_out, register_data)..)
        .unwrap_or_default();
    let register = get!(input, access_register_in, register_id);
    match get!(input, access_register_in, op_mod) {
        0 => write(device, register, given),
        1 => read(device, register, given, requested),
        _ => Err(Status::BadParameter),
    }
}

fn write(device: &mut Device, register: u32, data: &[u8]) -> Result<(), Status> {
    match register {
        // The requested values equal the fixed state of the port.
        HOST_ENDIANNESS => Ok(()),
        NODE_DESCRIPTION => {
            let text = data.first_chunk().ok_or(Status::BadInputLength)?;
            device.firmware.description.0 = *text;
            Ok(())
        }
        _ => Err(Status::BadParameter),
    }
}

fn read(device: &Device, register: u32, given: &[u8], data: &mut [u8]) -> Result<(), Status> {
    match register {
        HOST_ENDIANNESS => (),
        NODE_DESCRIPTION => data
            .first_chunk_mut::<64>()
            .ok_or(Status::BadOutputLength)?
            .copy_from_slice(&device.firmware.description.0),
        PMTU => {
            set!(data, pmtu_reg, max_mtu, MTU);
            set!(data, pmtu_reg, admin_mtu, MTU);
            set!(data, pmtu_reg, oper_mtu, MTU);
        }
        PTYS => {
            set!(data, ptys_reg, ib_link_width_capability, WIDTH_4X);
            set!(data, ptys_reg, ib_proto_capability, EDR);
            set!(data, ptys_reg, ib_link_width_admin, WIDTH_4X);
            set!(data, ptys_reg, ib_proto_admin, EDR);
            set!(data, ptys_reg, ib_link_width_oper, WIDTH_4X);
            set!(data, ptys_reg, ib_proto_oper, EDR);
        }
        PVLC => {
            set!(data, pvlc_reg, vl_hw_cap, FOUR_LANES);
            set!(data, pvlc_reg, vl_admin, FOUR_LANES);
            set!(data, pvlc_reg, vl_operational, FOUR_LANES);
        }
        // Error counters, always 0: the links have no such errors.
        PPCNT if get!(given, ppcnt_reg, grp) == INFINIBAND_COUNTERS => (),
        _ => return Err(Status::BadParameter),
    }
    Ok(())
}
