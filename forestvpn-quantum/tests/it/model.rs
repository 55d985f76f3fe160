//! Two devices, a link that loses, repeats, delays and reorders, an attacker, and everything that happens to
//! machines: roaming, suspend, restart, interfaces going down. Random, but reproducible: a failure names its
//! seed, and `MODEL_SEED=n cargo test -p forestvpn-quantum --test it model` runs that one alone;
//! `MODEL_RUNS=n` runs more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use forestvpn_quantum::PresharedKey;
use forestvpn_quantum::batch::Endpoint;

use crate::harness::*;

/// From the moment the link is good again, with traffic both ways, until both directions deliver.
///
/// The protocol itself needs at most two rounds of 5 s + 333 ms (a handshake that was cut off is retried
/// after one; a second is lost when both call at once or the other end consumed an initiation less than 20 ms
/// ago). Before that an end may trust a session that the other has lost (restart): it notices after
/// 10 + 5 s + 333 ms without an answer (C-TMR-4). The last 250 ms are the pause between two packets here.
const RECOVERY: f64 = 2.0 * 5.4 + 15.4 + 0.25;

/// Handshake messages and deadlines that may have piled up for one host, at four a call.
const CALLS: usize = 200;

#[derive(Clone, Copy)]
struct Link {
    loss: u64,
    twice: u64,
    delay: f64,
}

const GOOD: Link = Link { loss: 0, twice: 0, delay: 0.0 };

struct Model {
    w: World,
    rng: Seeded,
    link: Link,
    /// Datagrams on the wire, by time and number: position in the log.
    flying: BTreeMap<(Duration, u64), usize>,
    numbered: u64,
    /// How much of the log was put on the wire.
    taken: usize,
    up: [bool; 2],
    psk: Option<[u8; 32]>,
    /// Inner packets by number, for each sender.
    sent: [HashMap<u64, Vec<u8>>; 2],
    delivered: [HashSet<u64>; 2],
    /// Wire position of each delivered packet, for each receiver.
    order: [BTreeMap<usize, u64>; 2],
    nonces: HashSet<(usize, u32, u64)>,
    /// When a host last sent an initiation, unless it forgot that legitimately.
    initiated: [Option<Duration>; 2],
    addresses: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut w = World::pair();
        w.seed = seed.wrapping_mul(1_000);
        w.filter = Box::new(|_| Fate::Drop);
        let mut model = Self {
            w,
            rng: Seeded(seed),
            link: GOOD,
            flying: BTreeMap::new(),
            numbered: 0,
            taken: 0,
            up: [true; 2],
            psk: None,
            sent: Default::default(),
            delivered: Default::default(),
            order: Default::default(),
            nonces: HashSet::new(),
            initiated: [None; 2],
            addresses: 0,
        };
        // The devices that World::pair made have the same randomness in every run.
        model.restart(A);
        model.restart(B);
        model
    }

    fn below(&mut self, n: u64) -> u64 {
        self.rng.next() % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn some(&mut self, max: f64) -> Duration {
        secs(self.below(1_000_000) as f64 / 1e6 * max)
    }

    /// Puts new datagrams on the wire and checks what can be seen there.
    fn take(&mut self) {
        while let Some(sent) = self.w.log.get(self.taken).cloned() {
            let from = if sent.from == self.w.hosts[B].addr { B } else { A };
            assert!(self.up[from], "a datagram from an interface that is down");
            if sent.kind() == 4 {
                // Between restarts each session has its own random index: index and counter name a nonce.
                assert!(self.nonces.insert((from, sent.index(), sent.counter())), "a nonce is used twice");
            }
            if sent.kind() == 1 {
                if let Some(last) = self.initiated[from] {
                    assert!(sent.at >= last + secs(5.0), "initiations less than 5 s apart");
                }
                self.initiated[from] = Some(sent.at);
            }
            if !self.chance(self.link.loss) {
                for _ in 0..if self.chance(self.link.twice) { 2 } else { 1 } {
                    let at = self.w.t + self.some(self.link.delay);
                    self.numbered += 1;
                    self.flying.insert((at, self.numbered), self.taken);
                }
            }
            self.taken += 1;
        }
    }

    /// Serves one host: being due must end, and soon.
    fn serve(&mut self, host: usize) {
        for _ in 0..CALLS {
            let now = self.w.now();
            let Some(at) = self.w.hosts[host].device.poll_timeout() else { return };
            if at > now.mono {
                return;
            }
            self.w.with(host, |d, now, out| d.handle_timeout(now, out));
        }
        panic!("host {host} stays due");
    }

    fn arrive(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8], position: Option<usize>) {
        let Some(host) = self.w.hosts.iter().position(|h| h.addr == to) else { return };
        let before = self.w.hosts[host].delivered.len();
        self.w.arrive(host, Endpoint::new(from), bytes, Default::default());
        for (_, packet) in self.w.hosts[host].delivered.split_off(before) {
            let position = position.expect("only what a device sent can be delivered");
            let id = u64::from_be_bytes(packet[28..36].try_into().unwrap());
            assert_eq!(self.sent[1 - host].get(&id), Some(&packet), "delivered as it was sent");
            assert!(self.delivered[host].insert(id), "delivered twice");
            let order = &mut self.order[host];
            assert!(
                order.range(..position).next_back().is_none_or(|(_, before)| *before < id),
                "order on the wire"
            );
            assert!(order.range(position..).next().is_none_or(|(_, after)| *after > id), "order on the wire");
            order.insert(position, id);
        }
        self.serve(host);
    }

    /// Everything that is due now.
    fn settle(&mut self) {
        loop {
            self.serve(A);
            self.serve(B);
            self.take();
            for host in &self.w.hosts {
                assert!(host.device.staged_bytes() <= 256 << 10, "waiting packets are bounded");
            }
            let Some((&key, &position)) =
                self.flying.first_key_value().filter(|((at, _), _)| *at <= self.w.t)
            else {
                return;
            };
            self.flying.remove(&key);
            let sent = self.w.log[position].clone();
            self.arrive(sent.from, sent.to, &sent.bytes, Some(position));
        }
    }

    fn run_for(&mut self, by: Duration) {
        let end = self.w.t + by;
        self.settle();
        loop {
            let deadlines =
                self.w.hosts.iter().filter_map(|h| h.device.poll_timeout().map(World::virtual_time));
            let next = deadlines.chain(self.flying.keys().map(|(at, _)| *at)).min();
            let Some(next) = next.filter(|next| *next <= end) else { break };
            assert!(next > self.w.t, "time goes on");
            self.w.t = next;
            self.settle();
        }
        self.w.t = end;
        self.settle();
    }

    fn send(&mut self, from: usize) -> u64 {
        self.numbered += 1;
        let id = self.numbered;
        let mut payload = vec![id as u8; 8 + self.below(1300) as usize];
        payload[..8].copy_from_slice(&id.to_be_bytes());
        let packet = packet(from, 1 - from, &payload);
        let result = self.w.send(from, &packet);
        assert_eq!(result.is_ok(), self.up[from], "{result:?}");
        self.sent[from].insert(id, packet);
        id
    }

    fn set_up(&mut self, host: usize, up: bool) {
        self.take();
        if !up {
            self.initiated[host] = None;
        }
        self.up[host] = up;
        self.w.with(host, |d, now, out| d.set_up(up, now, out));
    }

    fn restart(&mut self, host: usize) {
        self.take();
        self.w.restart(host, 1 - host);
        self.initiated[host] = None;
        self.up[host] = true;
        self.set_psk(host);
    }

    fn set_psk(&mut self, host: usize) {
        let psk = self.psk.map(PresharedKey::new);
        self.w.update_peer(host, 1 - host, |p| p.preshared_key = Some(psk));
    }

    /// The attacker sees everything; from anywhere it sends old packets and changed ones.
    fn attack(&mut self) {
        if self.w.log.is_empty() {
            return;
        }
        let position = self.below(self.w.log.len() as u64) as usize;
        let old = self.w.log[position].clone();
        let from = SocketAddr::from(([203, 0, 113, self.below(250) as u8], 7));
        let to = self.w.hosts[if old.to == self.w.hosts[B].addr { B } else { A }].addr;
        let mut bytes = old.bytes;
        if self.chance(30) {
            // Unchanged, only data that arrived before comes again. Everything else would be accepted as if the
            // network had been late (an initiation even twice, by an end that restarted): the endpoint follows
            // to the attacker until the peer is heard again, here as in the kernel.
            if self.order[A].contains_key(&position) || self.order[B].contains_key(&position) {
                self.arrive(from, to, &bytes, None);
            }
            return;
        }
        match self.below(3) {
            0 => {
                let at = self.below(bytes.len() as u64) as usize;
                // mac2 is not looked at without load: a changed one is no change.
                if bytes[0] == 1 && at >= 132 || bytes[0] == 2 && at >= 76 {
                    return;
                }
                bytes[at] ^= 1 << self.below(8);
            }
            1 => bytes.truncate(self.below(bytes.len() as u64) as usize),
            _ => bytes.extend([0; 16]),
        }
        self.arrive(from, to, &bytes, None);
    }

    fn act(&mut self) {
        let host = self.below(2) as usize;
        match self.below(100) {
            0..40 => {
                for _ in 0..=self.below(5) {
                    self.send(host);
                }
                self.settle();
            }
            40..55 => {
                let by = self.some(2.0);
                self.run_for(by);
            }
            55..65 => {
                let by = self.some(30.0);
                self.run_for(by);
            }
            65..68 => {
                let by = self.some(400.0);
                self.run_for(by);
            }
            68..70 => {
                // Suspend: nobody serves a deadline, the network loses what was on its way.
                self.flying.clear();
                let by = self.some(700.0);
                self.w.jump(by);
                self.settle();
            }
            70..78 => {
                let loss = [0, 10, 30, 50, 100][self.below(5) as usize];
                let delay = [0.0, 0.05, 0.5, 3.0][self.below(4) as usize];
                self.link = Link { loss, twice: self.below(30), delay };
            }
            78..82 => {
                self.addresses += 1;
                let [.., c, d] = self.addresses.to_be_bytes();
                self.take();
                self.w.hosts[A].addr = SocketAddr::from(([192, 0, 3, c], 1000 + u16::from(d)));
            }
            82..85 => {
                let mut psk = [0; 32];
                psk[0] = self.below(255) as u8 + 1;
                self.psk = self.chance(80).then_some(psk);
                self.set_psk(A);
                self.set_psk(B);
            }
            85..88 => {
                let seconds = [0, 1, 25, 65535][self.below(4) as usize];
                self.w.update_peer(host, 1 - host, |p| p.persistent_keepalive = Some(seconds));
                self.settle();
            }
            88..91 => {
                let up = !self.up[host];
                self.set_up(host, up);
                self.settle();
            }
            91..93 => self.restart(host),
            _ => self.attack(),
        }
    }

    /// The link heals; gives how long it took until both directions delivered.
    fn recover(&mut self) -> Duration {
        self.link = GOOD;
        for host in [A, B] {
            if !self.up[host] {
                self.set_up(host, true);
            }
        }
        let healed = self.w.t;
        let first = self.numbered;
        loop {
            self.send(A);
            self.send(B);
            self.run_for(secs(0.25));
            let arrived = |host: usize| self.delivered[host].iter().any(|id| *id > first);
            let took = self.w.t - healed;
            if arrived(A) && arrived(B) {
                return took;
            }
            assert!(took <= secs(RECOVERY), "no recovery {took:?} after the link healed");
        }
    }
}

fn run(seed: u64) -> Duration {
    let mut model = Model::new(seed);
    let mut worst = Duration::ZERO;
    for _ in 0..6 {
        for _ in 0..60 {
            model.act();
        }
        worst = worst.max(model.recover());
    }
    worst
}

#[test]
fn whatever_happens_to_link_and_hosts_the_invariants_hold_and_the_tunnel_recovers() {
    let from_env = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = match from_env("MODEL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("MODEL_RUNS").unwrap_or(40),
    };
    let mut worst = Duration::ZERO;
    for seed in seeds {
        match std::panic::catch_unwind(|| run(seed)) {
            Ok(took) => worst = worst.max(took),
            Err(panic) => {
                eprintln!("the model failed: reproduce with MODEL_SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("slowest recovery: {worst:?}");
}

// Found by the model: without a spread both ends call each other again at exactly the same moment, for ever.
//@test C-HS-7
#[test]
fn two_ends_that_call_at_once_under_steady_traffic_converge() {
    for seed in 0..20 {
        let mut w = World::pair();
        w.seed = 1_000 * seed;
        w.restart(A, B);
        w.restart(B, A);
        w.filter = Box::new(|_| Fate::Delay(secs(0.02)));
        // Both directions carry a packet every 10 ms: the first after the 5 s starts the next handshake.
        for tick in 0..1_650 {
            w.run_until(secs(f64::from(tick) * 0.01));
            w.send(A, &packet(A, B, b"ab")).unwrap();
            w.send(B, &packet(B, A, b"ba")).unwrap();
        }
        assert!(!w.payloads(A).is_empty() && !w.payloads(B).is_empty(), "seed {seed}");
    }
}
