// SPDX-License-Identifier: GPL-2.0

//! System calls for regions: allocation, mapping, rights, migration, accesses, and lists.

use super::parse_name;
use crate::{
    bindings,
    fabric::send::inflight::Direction,
    region::{
        alloc::AllocRequest,
        home::change::Change,
        map::open::{MapRequest, RegionSelector},
    },
    session::{
        args::{
            check_node_count, check_region_len, check_region_memory, check_reserved, deadline,
            parse_access, parse_atomic_update, parse_grant, parse_map_rights, parse_required_owner,
            parse_rights, parse_segments,
        },
        source::{self, Requester},
        uapi::UserArray,
        Session,
    },
    sys::pages::total_ram_bytes,
};
use kernel::prelude::*;
use kite_core::wire::RegionInfo;

/// Reads an array of node numbers from user space.
fn read_nodes(addr: u64, count: u32) -> Result<KVec<u32>> {
    UserArray::new(addr).read_all(check_node_count(count)?)
}

pub(super) fn alloc(
    session: &Session,
    mut alloc: bindings::kite_alloc,
) -> Result<bindings::kite_alloc> {
    let len = check_region_len(alloc.len)?;
    let nodes = read_nodes(alloc.nodes, alloc.node_count)?;
    let request = AllocRequest {
        len,
        nodes: &nodes,
        name: parse_name(&alloc.name)?,
        owner: source::current_uid(),
        other_rights: parse_rights(alloc.other_rights)?,
    };
    alloc.handle = session.alloc(&request)?;
    Ok(alloc)
}

pub(super) fn register(
    session: &Session,
    mut memory: bindings::kite_register,
) -> Result<bindings::kite_register> {
    check_reserved(memory.reserved)?;
    let request = AllocRequest {
        len: memory.len,
        nodes: &[],
        name: parse_name(&memory.name)?,
        owner: source::current_uid(),
        other_rights: parse_rights(memory.other_rights)?,
    };
    let base = usize::try_from(memory.addr).map_err(|_| EFAULT)?;
    let len = usize::try_from(memory.len).map_err(|_| EFAULT)?;
    session.rnic()?;
    check_region_memory(base, len)?;
    if memory.len > total_ram_bytes() {
        return Err(ENOMEM);
    }
    let pinned = session.pin_long_term(base, len)?;
    memory.handle = session.register(pinned, &request)?;
    Ok(memory)
}

pub(super) fn map(session: &Session, mut map: bindings::kite_map) -> Result<bindings::kite_map> {
    let requester = Requester::CurrentProcess;
    let mapped = session.map(&MapRequest {
        selector: parse_selector(&map)?,
        uid: source::current_uid(),
        rights: parse_map_rights(map.rights)?,
        required_owner: parse_required_owner(requester, map.owner, map.flags)?,
    })?;
    (map.handle, map.len) = (mapped.id, mapped.len);
    map.owner = requester.to_local_uid(mapped.owner_uid);
    Ok(map)
}

/// Returns the region that a map request names.
///
/// # Errors
///
/// - `EINVAL`: there are both a name and an ID, or neither.
/// - `ENAMETOOLONG`: the name has no terminating zero.
fn parse_selector(map: &bindings::kite_map) -> Result<RegionSelector> {
    match (parse_name(&map.name)?, map.home, map.region) {
        (Some(name), 0, 0) => Ok(RegionSelector::Name(name)),
        (None, home, region) if region != 0 => Ok(RegionSelector::Id(home, region)),
        _ => Err(EINVAL),
    }
}

pub(super) fn read_or_write(
    session: &Session,
    direction: Direction,
    rw: &bindings::kite_rw,
) -> Result {
    let (access, memory) = parse_access(Requester::CurrentProcess, direction, rw)?;
    session.access(rw.handle, &access, &memory)
}

pub(super) fn read_or_write_vectored(
    session: &Session,
    direction: Direction,
    rwv: &bindings::kite_rwv,
) -> Result {
    let array = UserArray::new(rwv.segments);
    let segments = parse_segments(Requester::CurrentProcess, rwv.count, |i| array.read(i))?;
    session.access_segments(rwv.handle, direction, &segments, deadline(rwv.timeout_ms))
}

pub(super) fn grant(session: &Session, grant: &bindings::kite_grant) -> Result {
    let request = parse_grant(Requester::CurrentProcess, grant)?;
    session.grant(grant.handle, &request)
}

pub(super) fn move_region(session: &Session, args: &bindings::kite_migrate) -> Result {
    let nodes = read_nodes(args.nodes, args.node_count)?;
    session.move_region(args.handle, &nodes, deadline(args.timeout_ms))
}

pub(super) fn rename(session: &Session, args: &bindings::kite_rename) -> Result {
    check_reserved(args.reserved)?;
    let name = parse_name(&args.name)?.ok_or(EINVAL)?;
    session.change_region(args.handle, Change::Rename(name), deadline(args.timeout_ms))
}

pub(super) fn atomic_update(
    session: &Session,
    mut a: bindings::kite_atomic,
) -> Result<bindings::kite_atomic> {
    a.value = session.atomic_update(a.handle, &parse_atomic_update(&a)?)?;
    Ok(a)
}

pub(super) fn query_region(
    session: &Session,
    mut out: bindings::kite_query_region,
) -> Result<bindings::kite_query_region> {
    let (mapping, rights) = session.mapping_and_rights(out.handle)?;
    let (layout, traits) = (mapping.layout()?, mapping.region_traits()?);
    out.len = layout.len();
    out.chunk_size = 1 << layout.shift();
    out.rights = rights.bits();
    (out.home, out.region) = (mapping.home, mapping.region);
    out.owner = Requester::CurrentProcess.to_local_uid(traits.owner_uid);
    out.reserved = 0;
    Ok(out)
}

pub(super) fn list_regions(
    session: &Session,
    mut list: bindings::kite_list_regions,
) -> Result<bindings::kite_list_regions> {
    if list.count == 0 {
        return Err(EINVAL);
    }
    let mut entries = KVec::new();
    let add_entry = |home, entry: RegionInfo, in_conflict| {
        let entry = bindings::kite_region_entry {
            name: *entry.name.as_field(),
            region: entry.region,
            created_at: entry.created_at,
            len: entry.len,
            owner: Requester::CurrentProcess.to_local_uid(entry.owner_uid),
            other_rights: entry.other_rights.bits(),
            open_handles: entry.mapping_count,
            home,
            flags: match in_conflict {
                true => bindings::KITE_REGION_CONFLICT,
                false => 0,
            },
            reserved: 0,
        };
        Ok(entries.push(entry, GFP_KERNEL)?)
    };
    list.cursor = session.enter_memory_service()?.list_regions(
        list.node,
        list.cursor,
        list.count,
        add_entry,
    )?;
    // Copy the entries after the service guard is dropped: a page fault on user memory must not delay RNIC
    // removal.
    let user_array = UserArray::new(list.entries);
    for (i, entry) in entries.iter().enumerate() {
        user_array.write(i, *entry)?;
    }
    list.count = entries.len() as u32;
    Ok(list)
}
