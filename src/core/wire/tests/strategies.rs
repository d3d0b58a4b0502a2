// SPDX-License-Identifier: GPL-2.0

//! Generators of control messages, of their fields and of lists for the property tests.

use super::*;
use crate::{
    atomic::AtomicOp,
    layout::{Layout, MAX_CHUNK_SHIFT},
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
    wire::targets::DirectoryEntry,
};
use proptest::prelude::*;

pub(super) fn named_regions() -> impl Strategy<Value = NamedRegion> {
    (names(), any::<(u64, u32, u64)>()).prop_map(|(name, (created_at, home, region))| NamedRegion {
        name,
        created_at,
        home,
        region,
    })
}

pub(super) fn names() -> impl Strategy<Value = Name> {
    prop::collection::vec(1u8.., 1..64).prop_map(|bytes| Name::new(&bytes).unwrap())
}

fn rights() -> impl Strategy<Value = Rights> {
    (0u32..8).prop_map(|bits| Rights::from_bits(bits).unwrap())
}

fn atomics() -> impl Strategy<Value = AtomicOp> {
    (0u8..3, any::<(u64, u64)>()).prop_map(|(kind, (operand, expected))| match kind {
        0 => AtomicOp::FetchAdd { operand },
        1 => AtomicOp::CompareSwap { operand, expected },
        _ => AtomicOp::Swap { operand },
    })
}

fn lent_chunk_addrs() -> impl Strategy<Value = LentChunkAddr> {
    any::<(u32, u64, u64, u32)>().prop_map(|(home, region, chunk, offset)| LentChunkAddr {
        home,
        region,
        chunk_addr: chunk,
        offset,
    })
}

fn acquire_kinds() -> impl Strategy<Value = AcquireKind> {
    prop_oneof![
        any::<bool>().prop_map(|shared| AcquireKind::Lock { shared }),
        (1u32..).prop_map(|count| AcquireKind::Barrier { count }),
    ]
}

fn release_reasons() -> impl Strategy<Value = ReleaseReason> {
    prop_oneof![
        Just(ReleaseReason::Unlocked),
        Just(ReleaseReason::Canceled),
        Just(ReleaseReason::OwnerDied)
    ]
}

/// Generates requests without a list.
pub(super) fn requests() -> impl Strategy<Value = ControlRequest<'static>> {
    let ids = || any::<(u64, u64)>();
    prop_oneof![
        (ids(), 12u8..=22, 1u32.., 1u32..=4096).prop_map(
            |((loan, region), shift, chunk_count, last_chunk_len)| ControlRequest::AllocLoan {
                loan,
                region,
                shift,
                chunk_count,
                last_chunk_len,
            }
        ),
        (1u64.., any::<u32>(), ids(), 0u32..1 << 29, atomics()).prop_map(
            |(sequence, home, (region, chunk_addr), word, op)| ControlRequest::RegionAtomic {
                sequence,
                home,
                region,
                chunk_addr,
                offset: 8 * word,
                op,
            }
        ),
        (1u64.., any::<(u32, u32)>(), 0u64..1 << 61, atomics()).prop_map(
            |(sequence, (mr_key, uid), word, op)| ControlRequest::MrAtomic {
                sequence,
                mr_key,
                uid,
                addr: 8 * word,
                op,
            }
        ),
        any::<(u64, u32)>()
            .prop_map(|(loan, first_chunk)| ControlRequest::GetLoanChunks { loan, first_chunk }),
        any::<u64>().prop_map(|loan| ControlRequest::ReleaseLoan { loan }),
        (names(), any::<(u64, u64)>()).prop_map(|(name, (region, created_at))| {
            ControlRequest::RegisterName {
                name,
                region,
                created_at,
            }
        }),
        (names(), any::<u64>())
            .prop_map(|(name, region)| ControlRequest::UnregisterName { name, region }),
        names().prop_map(|name| ControlRequest::LookupName { name }),
        (ids(), any::<u32>(), rights()).prop_map(|((region, mapping), uid, rights)| {
            ControlRequest::MapRegion {
                region,
                mapping,
                uid,
                rights,
            }
        }),
        any::<(u64, u32)>().prop_map(|(region, first_chunk)| ControlRequest::LocateChunks {
            region,
            first_chunk
        }),
        ids().prop_map(|(region, mapping)| ControlRequest::UnmapRegion { region, mapping }),
        ids().prop_map(|(region, mapping)| ControlRequest::FreeRegion { region, mapping }),
        (
            any::<u64>(),
            prop_oneof![
                Just(InvalidateReason::Freed),
                Just(InvalidateReason::Revoked)
            ]
        )
            .prop_map(|(mapping, reason)| ControlRequest::InvalidateMapping { mapping, reason }),
        any::<u64>().prop_map(|region| ControlRequest::RevokeStatus { region }),
        (1u64..).prop_map(|sequence| ControlRequest::CancelRequest { sequence }),
        (1u64.., ids(), any::<(bool, u32)>(), rights()).prop_map(
            |(sequence, (region, mapping), grantee, rights)| ControlRequest::GrantRights {
                sequence,
                region,
                mapping,
                grantee,
                rights,
            }
        ),
        any::<(u64, u32)>().prop_map(|(cursor, max_entries)| ControlRequest::ListRegions {
            cursor,
            max_entries
        }),
        any::<((u64, u64), u64, u16)>().prop_map(|((region, mapping), ring_region, ring_id)| {
            ControlRequest::AttachRing {
                region,
                mapping,
                ring_region,
                ring_id,
            }
        }),
        any::<(u64, u16)>().prop_map(|(ring_region, ring_id)| ControlRequest::DetachRing {
            ring_region,
            ring_id
        }),
        (1u64.., ids(), any::<u64>(), acquire_kinds(), any::<bool>()).prop_map(
            |(ticket, (region, mapping), sync_id, kind, is_blocking)| {
                ControlRequest::EnqueueWaiter {
                    ticket,
                    region,
                    mapping,
                    sync_id,
                    kind,
                    is_blocking,
                }
            }
        ),
        (1u64.., ids(), acquire_kinds(), release_reasons()).prop_map(
            |(ticket, (region, sync_id), kind, reason)| {
                ControlRequest::RemoveWaiter {
                    ticket,
                    region,
                    sync_id,
                    kind,
                    reason,
                }
            }
        ),
        (1u64.., lent_chunk_addrs(), any::<(u32, u8)>()).prop_map(
            |(sequence, destination, (len, byte))| ControlRequest::Fill {
                sequence,
                destination,
                len,
                byte,
            }
        ),
        (1u64.., lent_chunk_addrs(), lent_chunk_addrs(), any::<u32>()).prop_map(
            |(sequence, source, destination, len)| {
                ControlRequest::Copy {
                    sequence,
                    source,
                    destination,
                    len,
                }
            }
        ),
        (
            1u64..PUSH_SEQUENCE_FLAG,
            lent_chunk_addrs(),
            chunk_locations(),
            chunk_locations(),
            1u32..
        )
            .prop_map(|(number, source, home, destination, len)| {
                ControlRequest::PushCopy {
                    sequence: number | PUSH_SEQUENCE_FLAG,
                    source,
                    home: home.instance,
                    destination,
                    len,
                }
            }),
        ids().prop_map(|(region, token)| ControlRequest::ChangeStatus { region, token }),
        (1u64.., ids(), any::<(u64, u32)>(), names()).prop_map(
            |(sequence, (region, mapping), (token, timeout_ms), name)| {
                ControlRequest::RenameRegion {
                    sequence,
                    region,
                    mapping,
                    token,
                    timeout_ms,
                    name,
                }
            }
        ),
        (1u64.., any::<u64>())
            .prop_map(|(sequence, region)| ControlRequest::QuiesceRegion { sequence, region }),
        (any::<u64>(), 0u64..1 << 60).prop_map(|(ticket, generation)| {
            ControlRequest::NotifyGranted {
                ticket,
                reply: AcquireReply::BarrierPassed(generation),
            }
        }),
        directory_entries().prop_map(|entry| ControlRequest::PublishAddress { entry }),
        Just(ControlRequest::Probe),
    ]
}

fn directory_entries() -> impl Strategy<Value = DirectoryEntry> {
    let numbers = any::<(u32, u32)>();
    (1u32..=65535, any::<[u64; 3]>(), 0u64..1 << 63, numbers).prop_map(
        |(node, [incarnation, epoch, dc_key], mr_table_addr, (dctn, rkey))| DirectoryEntry {
            instance: NodeInstance { node, incarnation },
            epoch,
            dctn,
            dc_key,
            rkey,
            mr_table_addr,
        },
    )
}

/// Generates replies without a list.
pub(super) fn replies() -> impl Strategy<Value = ControlReply<'static>> {
    prop_oneof![
        Just(ControlReply::Done),
        any::<u64>().prop_map(|word| ControlReply::OldValue { word }),
        any::<(u64, u16)>().prop_map(|(ring_region, ring_id)| ControlReply::RingAttached {
            ring_region,
            ring_id
        }),
        (0u64..1 << 63, 0u32..32).prop_map(|(addr, log)| ControlReply::DirectoryAddr {
            addr,
            bucket_count: 1 << log
        }),
        (1u32..4096).prop_map(|errno| ControlReply::Failed { errno }),
        any::<(u32, u64)>().prop_map(|(home, region)| ControlReply::NameFound { home, region }),
        (1u64..1 << 44, 12u8..=22, any::<(u32, bool)>())
            .prop_filter("a layout", |(len, shift, _)| Layout::new(*len, *shift)
                .is_some())
            .prop_map(|(len, shift, (owner_uid, is_named))| ControlReply::Mapped {
                len,
                shift,
                owner_uid,
                is_named,
            }),
    ]
}

/// Generates addresses of chunks, of which all bytes have an address.
pub(super) fn chunk_addrs() -> impl Strategy<Value = u64> {
    0..=u64::MAX - (1 << MAX_CHUNK_SHIFT)
}

pub(super) fn chunk_locations() -> impl Strategy<Value = ChunkLocation> {
    (any::<(u32, u64)>(), chunk_addrs()).prop_map(|((node, incarnation), addr)| ChunkLocation {
        instance: NodeInstance { node, incarnation },
        addr,
    })
}

pub(super) fn region_infos() -> impl Strategy<Value = RegionInfo> {
    (names(), any::<([u64; 3], u32, u32)>(), rights()).prop_map(
        |(name, ([region, created_at, len], owner, mappers), others)| RegionInfo {
            name,
            region,
            created_at,
            len,
            owner_uid: owner,
            other_rights: others,
            mapping_count: mappers,
        },
    )
}

/// Writes `items` with `writer`, which must have space for all items.
pub(super) fn write_list<T: ListItem>(mut writer: ListWriter<'_, T>, items: Vec<T>) -> usize {
    assert!(items.into_iter().all(|item| writer.push(item)));
    writer.finish()
}

/// Generates messages that end with a list.
fn lists() -> impl Strategy<Value = Vec<u8>> {
    fn message(write: impl FnOnce(&mut [u8]) -> usize) -> Vec<u8> {
        let mut out = vec![0xaa; MAX_CONTROL_BYTES];
        let len = write(&mut out);
        out.truncate(len);
        out
    }
    let call = any::<(u64, u64)>();
    let addresses = prop::collection::vec(chunk_addrs(), 0..20);
    let located = prop::collection::vec(chunk_locations(), 0..20);
    let moved = prop::collection::vec((any::<u32>(), chunk_locations()), 0..=MAX_MOVED_CHUNKS);
    let nodes = prop::collection::vec(any::<u32>(), 1..=64);
    let ids = any::<(u64, u64, u64, u32)>();
    let names = prop::collection::vec(named_regions(), 0..6);
    let infos = prop::collection::vec(region_infos(), 0..6);
    prop_oneof![
        (call, addresses).prop_map(|((c, e), items)| message(|out| write_list(
            ListWriter::addresses(out, c, e),
            items
        ))),
        (1u64.., any::<u64>(), moved).prop_map(|(sequence, region, items)| {
            let mut room = [0; MAX_CONTROL_BYTES];
            let moved = WireList::from_items(items.iter().copied(), &mut room);
            assert_eq!(moved.len(), items.len());
            request(&ControlRequest::ResumeRegion {
                sequence,
                region,
                moved,
            })
        }),
        (any::<u64>(), nodes.clone()).prop_map(|(loan, items)| {
            let mut room = [0; MAX_CONTROL_BYTES];
            let chunks = WireList::from_items(items, &mut room);
            request(&ControlRequest::ShrinkLoan { loan, chunks })
        }),
        (1u64.., ids, nodes).prop_map(|(sequence, (region, mapping, token, timeout_ms), items)| {
            let mut room = [0; MAX_CONTROL_BYTES];
            let nodes = WireList::from_items(items.iter().copied(), &mut room);
            assert!(nodes.clone().eq(items));
            request(&ControlRequest::MigrateRegion {
                sequence,
                region,
                mapping,
                token,
                timeout_ms,
                nodes,
            })
        }),
        (call, located).prop_map(|((c, e), items)| message(|out| write_list(
            ListWriter::chunk_locations(out, c, e),
            items
        ))),
        (call, names).prop_map(|((c, e), items)| message(|out| write_list(
            ListWriter::names(out, c, e, c),
            items
        ))),
        (call, infos).prop_map(|((c, e), items)| message(|out| write_list(
            ListWriter::regions(out, c, e),
            items
        ))),
    ]
}

pub(super) fn messages() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        requests().prop_map(|message| request(&message)),
        replies().prop_map(|message| reply(&message)),
        lists(),
    ]
}
