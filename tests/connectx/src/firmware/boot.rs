// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands of initialisation and teardown: the driver enables the device, selects an interface version, gives pages to
//! the firmware, and initialises the device.

use tracing::debug;

use super::{FirmwareState, Handler, Phase, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, be64, get, put_be, set, size};
use crate::object::Objects;

/// Bit n is set if interface version n is supported.
const INTERFACES: u32 = 0b11;

/// Number of pages that firmware requests at boot and at initialisation. Firmware uses none of them; the requests test
/// that the driver gives and reclaims pages.
const BOOT_PAGES: u32 = 7;
const INIT_PAGES: u32 = 9;

const VENDOR: u32 = 0x2c9;
const BOARD: &[u8; 16] = b"KTE0000000001\0\0\0";

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_QUERY_ADAPTER => Some(query_adapter),
        MLX5_CMD_OP_INIT_HCA => Some(init),
        MLX5_CMD_OP_TEARDOWN_HCA => Some(teardown),
        MLX5_CMD_OP_ENABLE_HCA => Some(enable),
        MLX5_CMD_OP_DISABLE_HCA => Some(disable),
        MLX5_CMD_OP_QUERY_PAGES => Some(query_pages),
        MLX5_CMD_OP_MANAGE_PAGES => Some(manage_pages),
        MLX5_CMD_OP_QUERY_ISSI => Some(query_issi),
        MLX5_CMD_OP_SET_ISSI => Some(set_issi),
        MLX5_CMD_OP_SET_DRIVER_VERSION => Some(set_driver_version),
        MLX5_CMD_OP_NOP => Some(accept_without_effect),
        _ => None,
    }
}

fn enable(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    if get!(input, enable_hca_in, function_id) != 0 {
        return Err(Status::BadParameter);
    }
    if device.firmware.phase != Phase::Off {
        return Err(Status::BadSystemState);
    }
    device.firmware.phase = Phase::Enabled;
    Ok(())
}

fn disable(device: &mut Device, _: &[u8], _: &mut [u8]) -> Result<(), Status> {
    if device.firmware.phase != Phase::Enabled {
        return Err(Status::BadSystemState);
    }
    device.firmware = FirmwareState::default();
    Ok(())
}

fn init(device: &mut Device, _: &[u8], _: &mut [u8]) -> Result<(), Status> {
    if device.firmware.phase != Phase::Enabled {
        return Err(Status::BadSystemState);
    }
    device.firmware.phase = Phase::Initialised;
    Ok(())
}

fn teardown(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    if get!(input, teardown_hca_in, profile) != 0 {
        return Err(Status::BadParameter);
    }
    device.firmware.phase = Phase::Enabled;
    device.objects = Objects::default();
    device.engine = Default::default();
    Ok(())
}

fn query_adapter(_: &mut Device, _: &[u8], output: &mut [u8]) -> Result<(), Status> {
    set!(
        output,
        query_adapter_out,
        query_adapter_struct.ieee_vendor_id,
        VENDOR
    );
    let board = at!(query_adapter_out, query_adapter_struct.vsd_contd_psid);
    let place = output
        .get_mut(board..board + BOARD.len())
        .ok_or(Status::BadOutputLength)?;
    place.copy_from_slice(BOARD);
    Ok(())
}

fn query_pages(_: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let pages = match get!(input, query_pages_in, op_mod) {
        1 => BOOT_PAGES,
        2 => INIT_PAGES,
        3 => 0,
        _ => return Err(Status::BadParameter),
    };
    set!(output, query_pages_out, num_pages, pages);
    Ok(())
}

fn manage_pages(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let count = get!(input, manage_pages_in, input_num_entries) as usize;
    match get!(input, manage_pages_in, op_mod) {
        0 => debug!("driver has no pages"),
        1 => {
            let pages = input.get(at!(manage_pages_in, pas)..).unwrap_or_default();
            if pages.len() / 8 < count {
                return Err(Status::BadInputLength);
            }
            let lent = &mut device.firmware.pages;
            if lent.len() + count > (BOOT_PAGES + INIT_PAGES) as usize {
                return Err(Status::LimitExceeded);
            }
            lent.extend((0..count).map(|page| be64(pages, page * 8)));
        }
        2 => reclaim_pages(device, count, output),
        _ => return Err(Status::BadParameter),
    }
    Ok(())
}

fn reclaim_pages(device: &mut Device, requested: usize, output: &mut [u8]) {
    let first = at!(manage_pages_out, pas);
    let pages = &mut device.firmware.pages;
    let count = requested
        .min(pages.len())
        .min(output.len().saturating_sub(first) / 8);
    set!(output, manage_pages_out, output_num_entries, count as u32);
    for (index, page) in pages.drain(pages.len() - count..).enumerate() {
        put_be(output, first + index * 8, 8, page);
    }
}

fn query_issi(device: &mut Device, _: &[u8], output: &mut [u8]) -> Result<(), Status> {
    set!(
        output,
        query_issi_out,
        current_issi,
        device.firmware.interface
    );
    set!(output, query_issi_out, supported_issi_dw0, INTERFACES);
    Ok(())
}

fn set_issi(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let interface = get!(input, set_issi_in, current_issi);
    if interface >= 32 || (INTERFACES >> interface) & 1 == 0 {
        return Err(Status::BadParameter);
    }
    device.firmware.interface = interface;
    Ok(())
}

fn set_driver_version(_: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let text = input.get(at!(set_driver_version_in, driver_version)..size!(set_driver_version_in));
    let text = text.ok_or(Status::BadInputLength)?;
    debug!(driver = %String::from_utf8_lossy(text).trim_end_matches('\0'));
    Ok(())
}

fn accept_without_effect(_: &mut Device, _: &[u8], _: &mut [u8]) -> Result<(), Status> {
    Ok(())
}
