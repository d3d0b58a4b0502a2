// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for memory keys. The translation table of a key is set by the command, by UMR, or after a page fault.

use crate::device::Device;
use crate::engine::page_fault;
use crate::firmware::srq::write_context;
use crate::firmware::{Handler, Status};
use crate::layout::ifc::*;
use crate::layout::{at, be64, get, get64, put_be, set, size};
use crate::object::memic;
use crate::object::mkey::{Mkey, Mode, KLM, MTT, OCTOWORD, PRESENT};

/// Returns the handler of a command for memory keys.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_MKEY => Some(create),
        MLX5_CMD_OP_DESTROY_MKEY => Some(destroy),
        MLX5_CMD_OP_QUERY_MKEY => Some(query),
        MLX5_CMD_OP_PAGE_FAULT_RESUME => Some(resume),
        _ => None,
    }
}

/// Maximum size of the table of one key, in bytes. The table covers all memory of a program, in parts of 16 GiB.
const MAX_TABLE: usize = 64 << 20;

/// Maximum size of all tables with their caches, in bytes. The tables are memory of this process.
const MAX_TABLES: usize = 1 << 30;

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let mkey = describe(device, input)?;
    let objects = &mut device.objects;
    let bytes = objects.key_bytes + mkey.memory();
    if bytes > MAX_TABLES {
        return Err(Status::NoResources);
    }
    let number = objects.mkeys.insert(mkey).ok_or(Status::NoResources)?;
    objects.key_bytes = bytes;
    set!(output, create_mkey_out, mkey_index, number);
    Ok(())
}

/// Returns the key of a CREATE_MKEY command.
fn describe(device: &Device, input: &[u8]) -> Result<Mkey, Status> {
    let at = at!(create_mkey_in, memory_key_mkey_entry);
    let context = input
        .get(at..at + size!(mkc))
        .ok_or(Status::BadInputLength)?;
    let context: [u8; size!(mkc)] = context.try_into().map_err(|_| Status::BadInputLength)?;
    let mode = Mode::of(&context).ok_or(Status::BadParameter)?;
    if get!(context, mkc, bsf_en) != 0
        || get!(context, mkc, bsf_octword_size) != 0
        || get!(context, mkc, ma_translation_mode) != 0
        || get!(input, create_mkey_in, mkey_umem_valid) != 0
        || get!(input, create_mkey_in, data_direct) != 0
    {
        return Err(Status::BadParameter);
    }
    device
        .objects
        .plain
        .pds
        .get(get!(context, mkc, pd))
        .ok_or(Status::BadResource)?;
    let mkey = Mkey::new(context, mode, table(input, &context, mode)?);
    check(device, &mkey)?;
    Ok(mkey)
}

/// Returns the translation table. The context has its size, and the command has its first entries.
fn table(input: &[u8], context: &[u8], mode: Mode) -> Result<Vec<u8>, Status> {
    let size = get!(context, mkc, translations_octword_size) as usize * OCTOWORD;
    let given = get!(input, create_mkey_in, translations_octword_actual_size) as usize * OCTOWORD;
    if size > MAX_TABLE || given > size || (mode.entry() == 0 && size != 0) {
        return Err(Status::BadParameter);
    }
    let at = at!(create_mkey_in, klm_pas_mtt);
    let entries = input.get(at..at + given).ok_or(Status::BadInputLength)?;
    // UMR writes whole blocks of four.
    let mut table = vec![0; size.next_multiple_of(4 * OCTOWORD)];
    table[..given].copy_from_slice(entries);
    // If the pages have no access bits of their own, the rights of the context apply to each of them.
    if mode == Mode::Mtt && get!(input, create_mkey_in, pg_access) == 0 {
        for at in (0..given).step_by(MTT) {
            let entry = be64(&table, at);
            put_be(&mut table, at, MTT, entry | PRESENT);
        }
    }
    Ok(table)
}

/// Checks that the context is valid. UMR sets the rest of a context in the free state.
fn check(device: &Device, mkey: &Mkey) -> Result<(), Status> {
    let context = &mkey.context;
    let paged = matches!(mkey.mode, Mode::Mtt | Mode::Ksm);
    if paged && !(12..=62).contains(&mkey.log_page_size()) {
        return Err(Status::BadParameter);
    }
    if get!(context, mkc, free) != 0 && get!(context, mkc, umr_en) == 0 {
        return Err(Status::BadParameter);
    }
    if mkey.mode == Mode::Memic {
        let start = get64!(context, mkc, start_addr).checked_sub(memic::BAR_OFFSET);
        let start = start.ok_or(Status::BadParameter)?;
        if !device
            .objects
            .memic
            .is_allocated(start, get64!(context, mkc, len))
        {
            return Err(Status::BadParameter);
        }
    }
    Ok(())
}

fn destroy(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, destroy_mkey_in, mkey_index);
    let objects = &mut device.objects;
    let mkey = objects.mkeys.remove(number).ok_or(Status::BadResource)?;
    objects.key_bytes -= mkey.memory();
    Ok(())
}

fn query(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let mkey = device
        .objects
        .mkeys
        .get(get!(input, query_mkey_in, mkey_index))
        .ok_or(Status::BadResource)?;
    write_context(
        output,
        at!(query_mkey_out, memory_key_mkey_entry),
        &mkey.context,
    )?;
    // The first entries follow at the requested position.
    let at = at!(query_mkey_out, bsf0_klm0_pas_mtt0_1);
    let length = mkey
        .table()
        .len()
        .min(2 * KLM)
        .min(output.len().saturating_sub(at));
    write_context(output, at, &mkey.table()[..length])
}

/// Handles the reply of the driver to a page fault.
fn resume(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let info = input
        .get(at!(page_fault_resume_in, page_fault_info)..)
        .ok_or(Status::BadInputLength)?;
    let high = u64::from(get!(info, mem_page_fault_info, fault_token_47_32));
    let token = (high << 32) | u64::from(get!(info, mem_page_fault_info, fault_token_31_0));
    let is_present = get!(info, mem_page_fault_info, error) == 0;
    page_fault::complete_request(device, token, is_present).ok_or(Status::BadParameter)
}
