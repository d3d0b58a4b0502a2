// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests of unbound sessions, repeated bindings, and requests of the daemon.

use anyhow::Result;
use libc::*;

use super::{map, Checks};
use crate::support::abi::{name, *};

pub(super) fn check_unbound(checks: &mut Checks) -> Result<()> {
    let device = Device::open()?;
    let mut zero = [0_u8; 4096];
    for number in REQUESTS {
        let want = match number {
            KITE_IOC_BIND_NR | KITE_IOC_QUERY_RNIC_NR | KITE_IOC_GET_PARAMETERS_NR => continue,
            // These requests check their values first, and reject zeroes.
            KITE_IOC_ALLOC_NR
            | KITE_IOC_MAP_NR
            | KITE_IOC_RENAME_NR
            | KITE_IOC_LIST_REGIONS_NR
            | KITE_IOC_ATOMIC_NR
            | KITE_IOC_BARRIER_NR
            | KITE_IOC_CREATE_QUEUE_NR => &[ENOTCONN, EINVAL][..],
            // The permission of a user is checked first.
            KITE_IOC_JOIN_NR | KITE_IOC_SET_VIEW_NR | KITE_IOC_PROBE_NR => &[ENOTCONN, EPERM][..],
            _ => &[ENOTCONN][..],
        };
        checks.expect_any(
            &format!("request {number:#x}"),
            device.ioctl(number, &mut zero),
            want,
        );
    }
    let mut good = kite_alloc {
        len: 1,
        ..Default::default()
    };
    checks.expect(
        "allocating",
        device.ioctl(KITE_IOC_ALLOC_NR, &mut good),
        ENOTCONN,
    );
    checks.expect("mapping", map(&device, name("a"), KITE_READ).0, ENOTCONN);
    let mut rnic = kite_query_rnic::default();
    checks.expect(
        "describing",
        device.ioctl(KITE_IOC_QUERY_RNIC_NR, &mut rnic),
        0,
    );
    Ok(())
}

pub(super) fn check_bindings(checks: &mut Checks) -> Result<()> {
    let device = Device::open()?;
    for version in [0, KITE_ABI_VERSION + 1, u32::MAX] {
        let mut bind = kite_bind {
            version,
            ..binding()
        };
        checks.expect(
            "unknown version",
            device.ioctl(KITE_IOC_BIND_NR, &mut bind),
            EPROTONOSUPPORT,
        );
    }
    let mut absent = kite_bind {
        rnic: name("no-such-rnic"),
        ..binding()
    };
    checks.expect(
        "no such RNIC",
        device.ioctl(KITE_IOC_BIND_NR, &mut absent),
        ENODEV,
    );
    checks.expect(
        "the first binding",
        device.ioctl(KITE_IOC_BIND_NR, &mut binding()),
        0,
    );
    checks.expect(
        "the second binding",
        device.ioctl(KITE_IOC_BIND_NR, &mut binding()),
        EBUSY,
    );
    for index in [1000, u32::MAX] {
        let mut rnic = kite_query_rnic {
            index,
            ..Default::default()
        };
        checks.expect(
            "no such index",
            device.ioctl(KITE_IOC_QUERY_RNIC_NR, &mut rnic),
            ENOENT,
        );
    }
    let mut event = kite_event::default();
    checks.expect(
        "no event",
        device.ioctl(KITE_IOC_GET_EVENT_NR, &mut event),
        EAGAIN,
    );
    Ok(())
}

pub(super) fn check_daemon(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let good = kite_join {
        node: 7,
        incarnation: 1,
        ..Default::default()
    };
    let mut second = good;
    checks.expect(
        "a second daemon",
        device.ioctl(KITE_IOC_JOIN_NR, &mut second),
        EBUSY,
    );
    for (what, mut wrong) in [
        ("node 0", kite_join { node: 0, ..good }),
        (
            "node 65536",
            kite_join {
                node: 65536,
                ..good
            },
        ),
        (
            "incarnation 0",
            kite_join {
                incarnation: 0,
                ..good
            },
        ),
        (
            "a reserved field",
            kite_join {
                reserved: 1,
                ..good
            },
        ),
    ] {
        checks.expect(what, device.ioctl(KITE_IOC_JOIN_NR, &mut wrong), EINVAL);
    }
    let mut view = kite_set_view {
        epoch: u64::MAX,
        count: 1,
        ..Default::default()
    };
    checks.expect(
        "view of a session without a daemon",
        device.ioctl(KITE_IOC_SET_VIEW_NR, &mut view),
        EPERM,
    );
    Ok(())
}

pub(super) fn check_user(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let mut join = kite_join {
        node: 7,
        incarnation: 1,
        ..Default::default()
    };
    let mut view = kite_set_view {
        epoch: 1,
        count: 1,
        ..Default::default()
    };
    checks.expect("joining", device.ioctl(KITE_IOC_JOIN_NR, &mut join), EPERM);
    checks.expect(
        "a view",
        device.ioctl(KITE_IOC_SET_VIEW_NR, &mut view),
        EPERM,
    );
    checks.expect("a probe", probe(&device, 7, 1, 1), EPERM);
    Ok(())
}

fn probe(device: &Device, node: u32, incarnation: u64, timeout_ms: u32) -> Errno {
    let mut probe = kite_probe {
        node,
        timeout_ms,
        incarnation,
    };
    device.ioctl(KITE_IOC_PROBE_NR, &mut probe)
}

/// Checks views. The node must have no daemon: this session is the daemon of the RNIC.
pub(super) fn check_views(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let mut rnic = kite_query_rnic::default();
    checks.expect(
        "describing",
        device.ioctl(KITE_IOC_QUERY_RNIC_NR, &mut rnic),
        0,
    );
    let own = kite_member {
        node: 7,
        incarnation: 5,
        address: rnic.address,
        ..Default::default()
    };
    let mut join = kite_join {
        node: own.node,
        incarnation: own.incarnation,
        ..Default::default()
    };
    checks.expect("joining", device.ioctl(KITE_IOC_JOIN_NR, &mut join), 0);
    let view = |epoch, members: &[kite_member]| {
        let mut view = kite_set_view {
            epoch,
            count: members.len() as u32,
            members: members.as_ptr() as u64,
            ..Default::default()
        };
        device.ioctl(KITE_IOC_SET_VIEW_NR, &mut view)
    };
    let other = kite_member { node: 8, ..own };
    let (mut elsewhere, mut another) = (own, own);
    // InfiniBand addresses nodes by LID.
    elsewhere.address.gid[15] ^= 1;
    elsewhere.address.lid ^= 1;
    another.address.qpn += 1;
    for (what, epoch, members) in [
        ("epoch 0", 0, &[own][..]),
        ("view without members", 9, &[]),
        (
            "view with too many members",
            9,
            &[own; KITE_NODES_MAX as usize + 1],
        ),
        ("without this node", 9, &[other]),
        ("this node twice", 9, &[own, own]),
        ("unsorted members", 9, &[other, own]),
        (
            "wrong incarnation",
            9,
            &[kite_member {
                incarnation: 6,
                ..own
            }],
        ),
        ("wrong address", 9, &[elsewhere]),
        ("wrong QP number", 9, &[another]),
        ("node 0", 9, &[kite_member { node: 0, ..own }, own]),
        ("a reserved field", 9, &[kite_member { reserved: 1, ..own }]),
    ] {
        checks.expect(what, view(epoch, members), EINVAL);
    }
    checks.expect(
        "probe without a view",
        probe(&device, 8, 5, 1),
        EHOSTUNREACH,
    );
    let members = |own_epochs, other_epochs| {
        let member = |member: kite_member, (admitted_epoch, unreachable_since)| kite_member {
            admitted_epoch,
            unreachable_since,
            ..member
        };
        [member(own, own_epochs), member(other, other_epochs)]
    };
    for (what, own_epochs, other_epochs) in [
        ("unreachable local node", (1, 2), (1, 0)),
        ("admission after the view", (1, 0), (10, 0)),
        ("unreachable after the view", (1, 0), (1, 10)),
        ("unreachable since the admission", (1, 0), (4, 4)),
    ] {
        checks.expect(what, view(9, &members(own_epochs, other_epochs)), EINVAL);
    }
    checks.expect("a view", view(9, &members((1, 0), (1, 2))), 0);
    for (what, node, incarnation, timeout_ms, errno) in [
        ("probe without a timeout", 8, 5, 0, EINVAL),
        (
            "probe with a long timeout",
            8,
            5,
            KITE_PROBE_TIMEOUT_MS_MAX + 1,
            EINVAL,
        ),
        ("probe of an unreachable node", 8, 5, 1, EHOSTDOWN),
        ("probe of another incarnation", 8, 6, 1, EHOSTDOWN),
        ("probe of this node", 7, 5, 1, EHOSTDOWN),
        ("probe of node 0", 0, 5, 1, EHOSTDOWN),
    ] {
        checks.expect(what, probe(&device, node, incarnation, timeout_ms), errno);
    }
    for epoch in [9, 8] {
        checks.expect("epoch that does not increase", view(epoch, &[own]), EINVAL);
    }
    checks.expect("the next view", view(10, &[own]), 0);
    Ok(())
}
