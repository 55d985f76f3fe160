//! `fv health`: is each peer that should be talking still talking? For health checks of containers and for scripts:
//! short lines, and an exit code. Called by `main`; asks control sockets as `show` does.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use forestvpn_quantum::config::{DeviceSnapshot, PeerSnapshot};
use serde::Serialize;

use crate::key::public_text;
use crate::{show, uapi};

/// Keys are made anew every two minutes and thrown away after three: a peer that is in use is never older.
const FRESH: Duration = Duration::from_secs(180);

/// What is thought of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// It had a handshake lately.
    Ok,
    /// It had none, and nothing says that it should have: no keepalive is set.
    Idle,
    /// It should have had one.
    Silent,
}

#[derive(Debug, Serialize)]
struct Peer {
    public_key: String,
    state: State,
    /// Seconds since the last handshake, null when there was none.
    handshake_age: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Tunnel {
    interface: String,
    healthy: bool,
    /// A sentence that says what is wrong, null when nothing is.
    trouble: Option<&'static str>,
    peers: Vec<Peer>,
}

/// Looks at one tunnel, or at all of this machine, and prints a line for each peer. With `max_age` (seconds) every
/// peer must have had a handshake that lately; without it only those with a keepalive, within three minutes and once
/// more the time between two keepalives.
///
/// # Errors
/// Something is wrong: in one sentence, or empty when the lines have said it.
pub(crate) fn run(
    directory: &Path,
    ifname: Option<&str>,
    max_age: Option<u64>,
    json: bool,
) -> Result<(), String> {
    let names = match ifname {
        Some(name) => vec![name.to_owned()],
        None => show::names(directory)?,
    };
    if names.is_empty() {
        return Err("no tunnel runs in user space here".into());
    }
    let mut all = Vec::new();
    for name in names {
        let device = show::ask(directory, &name)?;
        // Only fv answers this; of others it is not known whether they are up.
        let report = show::exchange(directory, &name, "fv=1").unwrap_or_default();
        let down = report.lines().any(|line| line == "up=false");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        all.push(judge(name, &device, down, now, max_age));
    }
    let text = if json {
        serde_json::to_string_pretty(&all).map(|text| text + "\n").map_err(|e| e.to_string())?
    } else {
        all.iter().map(lines).collect()
    };
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => return Err(format!("cannot write: {e}")),
        _ => {}
    }
    if all.iter().all(|tunnel| tunnel.healthy) { Ok(()) } else { Err(String::new()) }
}

fn judge(
    interface: String,
    device: &DeviceSnapshot,
    down: bool,
    now: Duration,
    max_age: Option<u64>,
) -> Tunnel {
    let peers: Vec<_> = device.peers.iter().map(|peer| of_peer(peer, now, max_age)).collect();
    let trouble = if down {
        Some("the interface is down")
    } else if device.private_key.is_none() {
        Some("there is no private key")
    } else if peers.iter().any(|peer| peer.state == State::Silent) {
        Some("a peer is silent: look at its endpoint, the keys, and the way there")
    } else {
        None
    };
    Tunnel { interface, healthy: trouble.is_none(), trouble, peers }
}

fn of_peer(peer: &PeerSnapshot, now: Duration, max_age: Option<u64>) -> Peer {
    // A clock that was set back makes the last handshake one of the future: just now.
    let age = peer.last_handshake.map(|then| now.saturating_sub(then));
    let keepalive = Duration::from_secs(peer.persistent_keepalive.into());
    let limit = max_age.map_or_else(|| FRESH.saturating_add(keepalive), Duration::from_secs);
    let must_talk = max_age.is_some() || !keepalive.is_zero();
    let state = match age {
        Some(age) if age <= limit => State::Ok,
        _ if must_talk => State::Silent,
        _ => State::Idle,
    };
    Peer { public_key: public_text(&peer.public_key), state, handshake_age: age.map(|age| age.as_secs()) }
}

fn lines(tunnel: &Tunnel) -> String {
    let name = uapi::shown(&tunnel.interface);
    let mut out = String::new();
    for peer in &tunnel.peers {
        let state = match peer.state {
            State::Ok => "ok",
            State::Idle => "idle",
            State::Silent => "SILENT",
        };
        let age = peer.handshake_age.map_or_else(
            || "no handshake yet".to_owned(),
            |age| format!("handshake {} ago", show::span(age.max(1))),
        );
        let _ = writeln!(out, "{name} {} {state}: {age}", peer.public_key);
    }
    match tunnel.trouble {
        Some(trouble) => {
            let _ = writeln!(out, "{name} UNHEALTHY: {trouble}");
        }
        None => {
            let _ = writeln!(out, "{name} healthy");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use forestvpn_quantum::{PrivateKey, PublicKey};

    const NOW: Duration = Duration::from_secs(1_000_000_000);

    /// A peer with a keepalive whose last handshake was so many seconds ago.
    fn peer(keepalive: u16, ago: Option<u64>) -> PeerSnapshot {
        PeerSnapshot {
            public_key: PublicKey([7; 32]),
            preshared_key: None,
            endpoint: None,
            last_handshake: ago.map(|ago| NOW - Duration::from_secs(ago)),
            tx_bytes: 0,
            rx_bytes: 0,
            persistent_keepalive: keepalive,
            allowed_ips: Vec::new(),
        }
    }

    fn judged(peers: Vec<PeerSnapshot>, down: bool, max_age: Option<u64>) -> Tunnel {
        let private_key = Some(PrivateKey::new([1; 32]));
        let device = DeviceSnapshot { private_key, peers, ..DeviceSnapshot::default() };
        judge("wg0".into(), &device, down, NOW, max_age)
    }

    #[test]
    fn a_peer_with_keepalive_must_talk_and_one_without_may_be_idle() {
        for (keepalive, ago, expected) in [
            (25, Some(205), State::Ok),
            (25, Some(206), State::Silent),
            (25, None, State::Silent),
            (0, Some(180), State::Ok),
            (0, Some(181), State::Idle),
            (0, None, State::Idle),
            (600, Some(700), State::Ok),
        ] {
            let tunnel = judged(vec![peer(keepalive, ago)], false, None);
            assert_eq!(tunnel.peers[0].state, expected, "{keepalive} {ago:?}");
            assert_eq!(tunnel.healthy, expected != State::Silent);
        }
    }

    #[test]
    fn with_an_age_asked_for_every_peer_is_held_to_it() {
        for (ago, expected) in [(Some(60), State::Ok), (Some(61), State::Silent), (None, State::Silent)] {
            assert_eq!(judged(vec![peer(0, ago)], false, Some(60)).peers[0].state, expected, "{ago:?}");
        }
        let mut early = peer(25, None);
        early.last_handshake = Some(NOW + Duration::from_secs(5));
        assert_eq!(judged(vec![early], false, Some(0)).peers[0].state, State::Ok);
    }

    #[test]
    fn a_tunnel_that_is_down_or_has_no_key_is_unhealthy_whatever_its_peers_are() {
        assert_eq!(judged(vec![peer(25, Some(1))], true, None).trouble, Some("the interface is down"));
        let keyless = judge("wg0".into(), &DeviceSnapshot::default(), false, NOW, None);
        assert!(!keyless.healthy);
        assert!(judged(Vec::new(), false, None).healthy);
    }

    #[test]
    fn lines_are_short_enough_for_every_log() {
        let tunnel = judged(vec![peer(25, Some(31_536_000 + 86_400 * 364 + 86_399))], false, None);
        let tunnel = Tunnel { interface: "a-name-15-bytes".into(), ..tunnel };
        let text = lines(&tunnel);
        assert!(text.contains("SILENT: handshake 1 year, 364 days, 23 hours") && text.contains("UNHEALTHY"));
        assert!(text.lines().all(|line| line.len() < 150), "{text}");
    }
}
