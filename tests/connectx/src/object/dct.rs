// SPDX-License-Identifier: GPL-2.0 OR MIT
//! DC targets, which receive the requests of any DC initiator with the access key.

use crate::engine::dc::Initiators;
use crate::layout::{get, get64, size};
use crate::object::qp::Rights;

/// State of a DC target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DctState {
    /// Accepts connections and requests.
    #[default]
    Active = 0,
    /// Finishes messages in progress and drops requests of new connections.
    Draining = 1,
    /// Executes no requests.
    Drained = 2,
}

/// DC target.
#[derive(Clone, Debug)]
pub struct Dct {
    /// Number.
    pub number: u32,
    /// State.
    pub state: DctState,
    /// Protection domain.
    pub pd: u32,
    /// Access key that initiators must send.
    pub access_key: u64,
    /// Shared receive queue.
    pub srqn: u32,
    /// Completion queue.
    pub cqn: u32,
    /// User index in completions.
    pub user_index: u32,
    /// Set of Q counters.
    pub counters: u32,
    /// Access rights of initiators.
    pub rights: Rights,
    /// RNR timer code in NAKs if no receive is posted.
    pub min_rnr_nak: u8,
    /// MTU in bytes.
    pub mtu: u32,
    /// Maximum size of a message that is placed in the CQE: 32 or 64 bytes, or 0 for none.
    pub scatter_to_cqe: u8,
    /// Number of connections with a wrong key.
    pub violations: u32,
    /// Connections of initiators.
    pub initiators: Initiators,
    /// Context of the CREATE command.
    pub context: [u8; size!(dctc)],
}

impl Dct {
    /// Returns the target that a context describes.
    pub fn new(number: u32, context: [u8; size!(dctc)]) -> Dct {
        Dct {
            number,
            state: DctState::Active,
            pd: get!(context, dctc, pd),
            access_key: get64!(context, dctc, dc_access_key),
            srqn: get!(context, dctc, srqn_xrqn),
            cqn: get!(context, dctc, cqn),
            user_index: get!(context, dctc, user_index),
            counters: get!(context, dctc, counter_set_id),
            rights: Rights {
                read: get!(context, dctc, rre) != 0,
                write: get!(context, dctc, rwe) != 0,
                atomic: get!(context, dctc, rae) != 0,
            },
            min_rnr_nak: get!(context, dctc, min_rnr_nak) as u8,
            mtu: 128 << get!(context, dctc, mtu),
            scatter_to_cqe: match get!(context, dctc, cs_res) {
                1 => 32,
                2 => 64,
                _ => 0,
            },
            violations: 0,
            initiators: Initiators::default(),
            context,
        }
    }
}
