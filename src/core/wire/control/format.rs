// SPDX-License-Identifier: GPL-2.0

//! Format of the bodies of control messages: message numbers, order of the fields, and ranges of their
//! values.

use super::{ControlReply, ControlRequest, PUSH_SEQUENCE_FLAG};
use crate::{
    atomic::WORD_BYTES,
    layout::{Layout, StripeShare},
    sync::ticket::AcquireKind,
    wire::{
        codec::{is_valid_range, Field, Reader, Writer},
        list::is_valid_chunk_addr,
        targets::BUCKET_SIZE,
        Malformed,
    },
};

impl ControlRequest<'_> {
    /// Returns `true` if all fields are in range and consistent.
    pub(in crate::wire) fn is_valid(&self) -> bool {
        match *self {
            Self::AllocLoan {
                shift,
                chunk_count: chunks,
                last_chunk_len: tail,
                ..
            } => StripeShare {
                chunk_count: chunks,
                last_chunk_len: tail,
            }
            .layout(shift)
            .is_some(),
            Self::RegionAtomic {
                sequence: number,
                offset,
                ..
            } => number != 0 && u64::from(offset) % WORD_BYTES == 0,
            Self::MrAtomic {
                sequence: number,
                addr,
                ..
            } => number != 0 && addr % WORD_BYTES == 0,
            Self::Fill {
                sequence: number, ..
            }
            | Self::Copy {
                sequence: number, ..
            }
            | Self::GrantRights {
                sequence: number, ..
            }
            | Self::QuiesceRegion {
                sequence: number, ..
            }
            | Self::ResumeRegion {
                sequence: number, ..
            }
            | Self::RenameRegion {
                sequence: number, ..
            }
            | Self::CancelRequest { sequence: number } => number != 0,
            Self::PushCopy {
                sequence: number,
                len,
                ..
            } => number & PUSH_SEQUENCE_FLAG != 0 && number != PUSH_SEQUENCE_FLAG && len != 0,
            Self::MigrateRegion {
                sequence: number,
                ref nodes,
                ..
            } => number != 0 && nodes.len() != 0,
            Self::EnqueueWaiter {
                ticket, kind: wish, ..
            }
            | Self::RemoveWaiter {
                ticket, kind: wish, ..
            } => ticket != 0 && wish != (AcquireKind::Barrier { count: 0 }),
            _ => true,
        }
    }
}

impl ControlReply<'_> {
    /// Returns `true` if all fields are in range.
    pub(in crate::wire) fn is_valid(&self) -> bool {
        match *self {
            Self::Failed { errno } => (1..=4095).contains(&errno),
            Self::Mapped { len, shift, .. } => Layout::new(len, shift).is_some(),
            Self::Addresses(ref addresses) => addresses.clone().all(is_valid_chunk_addr),
            Self::DirectoryAddr { addr, bucket_count } => {
                let len = u64::from(bucket_count).saturating_mul(BUCKET_SIZE as u64);
                bucket_count.is_power_of_two() && is_valid_range(addr, len)
            }
            _ => true,
        }
    }
}

/// Generates encoder and decoder from one table: message numbers, and the fields in wire order.
macro_rules! wire_format {
    ($message:ident {
        $($number:literal => $kind:ident $({ $($field:ident),* })? $(($list:ident))?,)*
    }) => {
        impl<'a> $message<'a> {
            /// Returns the message number for the header.
            pub(in crate::wire) fn number(&self) -> u8 {
                match self {
                    $(Self::$kind { .. } => $number,)*
                }
            }

            /// Decodes the body of message `number`.
            pub(in crate::wire) fn get(number: u8, from: &mut Reader<'a>) -> Result<Self, Malformed> {
                match number {
                    $($number => {
                        $($(let $field = Field::get(from)?;)*)?
                        $(let $list = Field::get(from)?;)?
                        Ok(Self::$kind $({ $($field),* })? $(($list))?)
                    })*
                    _ => Err(Malformed),
                }
            }

            /// Encodes the body.
            pub(in crate::wire) fn put(&self, to: &mut Writer<'_>) {
                match self {
                    $(Self::$kind $({ $($field),* })? $(($list))? => {
                        $($($field.put(to);)*)?
                        $($list.put(to);)?
                    })*
                }
            }
        }
    };
}

wire_format!(ControlRequest {
    1 => AllocLoan { loan, region, shift, chunk_count, last_chunk_len },
    2 => GetLoanChunks { loan, first_chunk },
    3 => ReleaseLoan { loan },
    4 => RegisterName { name, region, created_at },
    5 => UnregisterName { name, region },
    6 => LookupName { name },
    7 => MapRegion { region, mapping, uid, rights },
    8 => LocateChunks { region, first_chunk },
    9 => UnmapRegion { region, mapping },
    10 => FreeRegion { region, mapping },
    11 => InvalidateMapping { mapping, reason },
    12 => ListRegions { cursor, max_entries },
    13 => SyncNames { epoch, is_last, names },
    14 => RegionAtomic { sequence, home, region, chunk_addr, offset, op },
    15 => AttachRing { region, mapping, ring_region, ring_id },
    16 => DetachRing { ring_region, ring_id },
    17 => EnqueueWaiter { ticket, region, mapping, sync_id, kind, is_blocking },
    18 => RemoveWaiter { ticket, region, sync_id, kind, reason },
    19 => NotifyGranted { ticket, reply },
    20 => Fill { sequence, destination, len, byte },
    21 => Copy { sequence, source, destination, len },
    22 => GrantRights { sequence, region, mapping, grantee, rights },
    23 => RevokeStatus { region },
    24 => CancelRequest { sequence },
    25 => PushCopy { sequence, source, home, destination, len },
    26 => MigrateRegion { sequence, region, mapping, token, timeout_ms, nodes },
    27 => ChangeStatus { region, token },
    28 => QuiesceRegion { sequence, region },
    29 => ResumeRegion { sequence, region, moved },
    30 => ShrinkLoan { loan, chunks },
    31 => PublishAddress { entry },
    32 => MrAtomic { sequence, mr_key, uid, addr, op },
    33 => Probe,
    34 => RenameRegion { sequence, region, mapping, token, timeout_ms, name },
});

wire_format!(ControlReply {
    1 => Done,
    2 => Failed { errno },
    3 => Addresses(addresses),
    4 => NameFound { home, region },
    5 => Mapped { len, shift, owner_uid, is_named },
    6 => Located(chunks),
    7 => Listed { cursor, entries },
    8 => OldValue { word },
    9 => RingAttached { ring_region, ring_id },
    10 => DirectoryAddr { addr, bucket_count },
});
